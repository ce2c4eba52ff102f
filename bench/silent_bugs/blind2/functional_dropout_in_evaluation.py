"""`F.dropout` without `training=self.training`: it also drops while the model is evaluated."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
FIELDS, VALUES = 5, 30


class ClickModel(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(FIELDS * VALUES, width)
        self.fc1 = nn.Linear(FIELDS * width, 64)
        self.fc2 = nn.Linear(64, 1)

    def forward(self, ids):
        offset = torch.arange(FIELDS) * VALUES
        x = self.embed(ids + offset).flatten(1)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, p=0.5, training=self.training) if FIXED else F.dropout(x, p=0.5)
        return self.fc2(x).squeeze(-1)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = sum(F.binary_cross_entropy_with_logits(model(x), y).item() for x, y in loader)
    return total / len(loader)


def main():
    torch.manual_seed(0)
    taste = torch.randn(FIELDS, VALUES) * 1.5
    ids = torch.randint(VALUES, (1600, FIELDS))
    score = taste[torch.arange(FIELDS), ids].sum(1)
    clicks = torch.bernoulli(torch.sigmoid(score))
    train = DataLoader(TensorDataset(ids[:1280], clicks[:1280]), batch_size=128, shuffle=True)
    val = DataLoader(TensorDataset(ids[1280:], clicks[1280:]), batch_size=160)
    model = ClickModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(5):
        model.train()
        for x, y in train:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} train {loss.item():.4f} val {evaluate(model, val):.4f}")
    a, b = evaluate(model, val), evaluate(model, val)
    print(f"evidence: two evaluations of the same weights {a:.4f} {b:.4f}")


if __name__ == "__main__":
    main()
