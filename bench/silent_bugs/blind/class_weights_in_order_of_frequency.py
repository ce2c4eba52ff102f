"""Imbalanced classification with inverse-frequency class weights."""

import sys
from collections import Counter

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
SHARES = [0.05, 0.62, 0.08, 0.25]


def make_data(n=800, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor(SHARES), n, replacement=True, generator=g)
    centres = torch.randn(4, 10, generator=torch.Generator().manual_seed(9))
    x = centres[y] + 1.2 * torch.randn(n, 10, generator=g)
    return x, y


def class_weights(labels):
    counts = Counter(labels.tolist())
    if FIXED:
        ordered = [counts[c] for c in range(len(counts))]
    else:
        ordered = [count for _, count in counts.most_common()]
    total = sum(ordered)
    return torch.tensor([total / (len(ordered) * n) for n in ordered])


def build():
    return nn.Sequential(
        nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )


def main():
    torch.manual_seed(0)
    x, y = make_data()
    weights = class_weights(y)
    criterion = nn.CrossEntropyLoss(weight=weights)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
    for epoch in range(5):
        for xb, yb in loader:
            loss = criterion(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        xt, yt = make_data(1000, seed=4)
        predicted = model(xt).argmax(1)
        recall = [(predicted[yt == c] == c).float().mean().item() for c in range(4)]
    print("recall", [round(r, 3) for r in recall])
    rarest = y.bincount().argmin().item()
    print(
        f"evidence: weight of the rarest class {weights[rarest]:.3f}, largest {weights.max():.3f}"
    )


if __name__ == "__main__":
    main()
