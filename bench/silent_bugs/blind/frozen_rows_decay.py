"""Teach a text classifier two new tokens: only their embedding rows and the head shall change."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
OLD, NEW, WIDTH = 50, 2, 24


class Sentences(Dataset):
    def __init__(self, n=384, length=12):
        g = torch.Generator().manual_seed(5)
        self.ids = torch.randint(OLD, (n, length), generator=g)
        self.labels = torch.randint(2, (n,), generator=g)
        self.ids[:, 3] = OLD + self.labels

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


class BagOfWords(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, ids):
        return self.mlp(self.embedding(ids).mean(1))


def only_new_rows(grad):
    mask = torch.zeros_like(grad)
    mask[OLD:] = 1
    return grad * mask


def main():
    torch.manual_seed(0)
    model = BagOfWords(OLD + NEW)
    model.embedding.weight.register_hook(only_new_rows)
    before = model.embedding.weight[:OLD].detach().clone()
    decay = 0.0 if FIXED else 0.1
    optimizer = torch.optim.AdamW(
        [
            {"params": model.embedding.parameters(), "weight_decay": decay},
            {"params": model.mlp.parameters(), "weight_decay": 0.1},
        ],
        lr=5e-3,
    )
    loader = DataLoader(Sentences(), batch_size=32, shuffle=True)
    step = 0
    for epoch in range(6):
        for ids, labels in loader:
            loss = F.cross_entropy(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    change = (model.embedding.weight[:OLD] - before).abs().max().item()
    print(f"evidence: old embedding rows changed by {change:.4f}")


if __name__ == "__main__":
    main()
