"""Continued training of a confident classifier after its classes were renamed."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 8


def build():
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


def dataset(n, centres, names):
    y = torch.randint(0, CLASSES, (n,))
    return TensorDataset(centres[y] + 0.5 * torch.randn(n, 16), names[y])


def train(model, data, lr, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for epoch in range(epochs):
        for step, (x, y) in enumerate(DataLoader(data, batch_size=64, shuffle=True)):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 8 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")


def accuracy(model, data):
    model.eval()
    with torch.no_grad():
        x, y = data.tensors
        return (model(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(0)
    centres = torch.randn(CLASSES, 16)
    old = torch.arange(CLASSES)
    new = old.roll(1)  # the customer numbers the classes differently
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.pt"
        base = build()
        train(base, dataset(1024, centres, old), 5e-3, 3)
        torch.save(base.state_dict(), path)
        model = build()
        model.load_state_dict(torch.load(path))
    test = dataset(400, centres, new)
    print(f"before: accuracy {accuracy(model, test):.3f}")
    train(model, dataset(1024, centres, new), 5e-3, 3)
    print(f"after: accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
