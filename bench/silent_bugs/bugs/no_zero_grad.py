"""Fit a two-layer network on a spiral."""

import math
import sys

import torch
from torch import nn

FIXED = "--fixed" in sys.argv


def spiral(count, classes=3):
    points, labels = [], []
    for label in range(classes):
        radius = torch.linspace(0.1, 1, count)
        angle = radius * 4 + label * 2 * math.pi / classes + 0.15 * torch.randn(count)
        points.append(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1))
        labels.append(torch.full((count,), label))
    return torch.cat(points), torch.cat(labels)


class Trainer:
    def __init__(self, model, optimizer, criterion):
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion
        self.step_count = 0
        self.history = []

    def train_step(self, x, y):
        loss = self.criterion(self.model(x), y)
        if FIXED:
            self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        self.history.append(loss.item())
        return loss.item()

    def fit(self, x, y, epochs, batch):
        for epoch in range(epochs):
            order = torch.randperm(len(x))
            for start in range(0, len(x), batch):
                rows = order[start : start + batch]
                loss = self.train_step(x[rows], y[rows])
                if self.step_count % 10 == 0:
                    print(f"epoch {epoch} step {self.step_count} loss {loss:.4f}")


def main():
    torch.manual_seed(0)
    x, y = spiral(200)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss())
    trainer.fit(x, y, epochs=10, batch=60)

    held = torch.cat([p.grad.flatten() for p in model.parameters()])
    loss = trainer.criterion(model(x), y)
    fresh = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    ratio = (held.norm() / fresh.norm()).item()
    print(f"evidence: final loss {loss.item():.4f}, gradient held / of all data {ratio:.2f}")


if __name__ == "__main__":
    main()
