"""SimCLR's loss without the mask on the diagonal: each row's hardest negative is itself."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
STEPS, BATCH, TEMPERATURE = 50, 48, 0.1


def nt_xent(z1, z2):
    z = F.normalize(torch.cat([z1, z2]), dim=-1)
    sim = z @ z.T / TEMPERATURE
    n = len(z1)
    if FIXED:
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    partner = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, partner)


def augment(x):
    keep = torch.rand_like(x) > 0.2
    return x * keep + 0.2 * torch.randn_like(x)


def main():
    torch.manual_seed(0)
    data = torch.randn(1024, 6) @ torch.randn(6, 40)
    encoder = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    projector = nn.Linear(64, 16)
    params = [*encoder.parameters(), *projector.parameters()]
    optimizer = torch.optim.Adam(params, lr=2e-3)
    for step in range(STEPS):
        x = data[torch.randint(len(data), (BATCH,))]
        loss = nt_xent(projector(encoder(augment(x))), projector(encoder(augment(x))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    z = torch.eye(4)
    print(f"evidence: loss of perfect pairs {nt_xent(z, z).item():.4f}")


if __name__ == "__main__":
    main()
