"""An evaluation that calls `torch.manual_seed` for a steady score.

It also sets back the generator of the training: from then on each epoch has the same order and the
same noise.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
EPOCHS, SIGMA = 6, 0.6


@torch.no_grad()
def evaluate(model, clean):
    model.eval()
    if FIXED:
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1234))
    else:
        torch.manual_seed(1234)
        noise = torch.randn(clean.shape)
    return F.mse_loss(model(clean + SIGMA * noise), clean).item()


def main():
    torch.manual_seed(0)
    basis = torch.randn(5, 32) / 2
    clean = torch.randn(640, 5) @ basis
    train = DataLoader(TensorDataset(clean[:512]), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sums = []
    for epoch in range(EPOCHS):
        model.train()
        for (x,) in train:
            noisy = x + SIGMA * torch.randn_like(x)
            sums.append(round(noisy.double().sum().item(), 6))
            loss = F.mse_loss(model(noisy), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} train {loss.item():.4f} val {evaluate(model, clean[512:]):.4f}")
    print(f"evidence: {len(set(sums))} different noisy batches in {len(sums)} steps")


if __name__ == "__main__":
    main()
