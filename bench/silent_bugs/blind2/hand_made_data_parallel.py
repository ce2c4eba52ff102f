"""Data parallel training by hand: gradients are averaged, but the ranks start from other weights.

The seed holds the rank, for other data on each; nobody sends rank 0's weights round.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
STEPS = 40


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, padding=2)
        self.fc = nn.Linear(8 * 20, 3)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))


def make_batch(n=32):
    kind = torch.randint(3, (n,))
    t = torch.linspace(0, 1, 20)
    wave = torch.sin(2 * torch.pi * ((kind[:, None] + 1) * t + torch.rand(n, 1)))
    return (wave + 0.5 * torch.randn(n, 20))[:, None], kind


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1234 + rank)
    model = Net()
    if FIXED:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        x, y = make_batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = mine.clone()
    dist.broadcast(other, 0)
    gap = (mine - other).norm()
    dist.all_reduce(gap)
    if rank == 0:
        print(f"evidence: distance between the ranks' weights {gap.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
