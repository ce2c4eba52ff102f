"""Rare classes: a weighted cross entropy, plain sampling."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def imbalanced(n, shares, centres):
    y = torch.multinomial(shares, n, replacement=True)
    return TensorDataset(centres[y] + torch.randn(n, 10), y)


def recall_per_class(model, data, classes):
    model.eval()
    x, y = data.tensors
    with torch.no_grad():
        prediction = model(x).argmax(1)
    model.train()
    return [(prediction[y == c] == c).float().mean().item() for c in range(classes)]


def main():
    torch.manual_seed(0)
    shares = torch.tensor([0.9, 0.07, 0.03])
    centres = torch.randn(3, 10)
    train, test = imbalanced(2000, shares, centres), imbalanced(2000, shares, centres)
    counts = torch.bincount(train.tensors[1], minlength=3).float()
    weights = counts.sum() / (3 * counts)
    print(f"weights {[round(w, 2) for w in weights.tolist()]}")
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        for step, (x, y) in enumerate(DataLoader(train, batch_size=100, shuffle=True)):
            loss = F.cross_entropy(model(x), y, weight=weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        recall = recall_per_class(model, test, 3)
        print(f"epoch {epoch}: recall {[round(r, 3) for r in recall]}")


if __name__ == "__main__":
    main()
