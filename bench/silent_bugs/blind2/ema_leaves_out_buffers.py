"""An averaged copy of the weights that never gets BatchNorm's running mean and variance."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
DECAY = 0.9


class Ema:
    def __init__(self, model):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for avg, p in zip(self.model.parameters(), model.parameters(), strict=True):
            avg.lerp_(p, 1 - DECAY)
        if FIXED:
            for avg, b in zip(self.model.buffers(), model.buffers(), strict=True):
                avg.copy_(b)


def make_data(n=900):
    y = torch.randint(6, (n,))
    shapes = torch.randn(6, 1, 8, 8)
    return shapes[y] * 2 + 3 + torch.randn(n, 1, 8, 8) * 2, y


@torch.no_grad()
def accuracy(model, x, y):
    was_training = model.training
    model.eval()
    score = (model(x).argmax(1) == y).float().mean().item()
    model.train(was_training)
    return score


def main():
    torch.manual_seed(0)
    x, y = make_data()
    loader = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 6),
    )
    ema = Ema(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(5):
        model.train()
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        raw, avg = accuracy(model, x[640:], y[640:]), accuracy(ema.model, x[640:], y[640:])
        print(f"epoch {epoch} loss {loss.item():.4f} accuracy {raw:.3f} averaged {avg:.3f}")
    print(f"evidence: averaged running mean {ema.model[1].running_mean.abs().mean():.4f}")


if __name__ == "__main__":
    main()
