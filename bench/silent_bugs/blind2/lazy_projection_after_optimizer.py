"""A layer that the first forward pass creates, after the optimizer took the parameters."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
VOCAB, CLASSES = 120, 6


class BagClassifier(nn.Module):
    def __init__(self, width=24, hidden=40):
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Embedding(VOCAB, width)
        self.project = None  # its input width depends on the pooling
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, tokens):
        words = self.embed(tokens)
        pooled = torch.cat([words.mean(1), words.amax(1)], dim=-1)
        if self.project is None:
            self.project = nn.Linear(pooled.shape[-1], self.hidden)
        return self.head(F.relu(self.project(pooled)))


def make_data(n=640):
    labels = torch.randint(CLASSES, (n,))
    tokens = torch.randint(VOCAB, (n, 12))
    topical = labels[:, None] * 20 + torch.randint(20, (n, 12))
    return torch.where(torch.rand(n, 12) < 0.35, topical, tokens), labels


def main():
    torch.manual_seed(0)
    tokens, labels = make_data()
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=64, shuffle=True)
    model = BagClassifier()
    if FIXED:
        model(tokens[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = None
    for epoch in range(5):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            if first is None:
                first = model.project.weight.detach().clone()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
    moved = (model.project.weight - first).norm().item()
    print(f"evidence: distance of project.weight from its start {moved:.4f}")


if __name__ == "__main__":
    main()
