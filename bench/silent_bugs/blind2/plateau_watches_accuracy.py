"""ReduceLROnPlateau in its default mode "min", fed with an accuracy: a rise counts as no gain."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
EPOCHS = 10


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(0)
    centers = torch.randn(8, 20) * 0.9
    y = torch.randint(8, (1000,))
    x = centers[y] + torch.randn(1000, 20)
    loader = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max" if FIXED else "min", factor=0.2, patience=1
    )
    for epoch in range(EPOCHS):
        model.train()
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val = accuracy(model, x[640:], y[640:])
        scheduler.step(val)
        lr = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch} loss {loss.item():.4f} val accuracy {val:.3f} lr {lr:.2g}")
    print(f"evidence: learning rate at the end {lr:.3g}, accuracy {val:.3f}")


if __name__ == "__main__":
    main()
