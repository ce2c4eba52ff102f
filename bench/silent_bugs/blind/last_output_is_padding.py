"""LSTM classifier for sequences of different lengths, padded on the right."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
PAD = 0


class Words(Dataset):
    """The class is told by the last word."""

    def __init__(self, n=512, seed=0):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 30, (n,), generator=g).tolist()
        self.items = [torch.randint(1, 41, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i], int(self.items[i][-1] > 20)


def collate(items):
    ids, labels = zip(*items, strict=True)
    lengths = torch.tensor([len(s) for s in ids])
    return pad_sequence(ids, batch_first=True, padding_value=PAD), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(41, width, padding_idx=PAD)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, ids, lengths):
        h, _ = self.lstm(self.embedding(ids))
        last = h[torch.arange(len(ids)), lengths - 1] if FIXED else h[:, -1]
        return self.head(last)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Words(), batch_size=32, shuffle=True, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(5):
        for ids, lengths, labels in loader:
            loss = nn.functional.cross_entropy(model(ids, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    ids, lengths, _ = collate([Words(seed=3)[i] for i in range(64)])
    wider = nn.functional.pad(ids, (0, 10), value=PAD)
    with torch.no_grad():
        gap = (model(ids, lengths) - model(wider, lengths)).abs().max().item()
    print(f"evidence: ten more columns of padding change the output by {gap:.4f}")


if __name__ == "__main__":
    main()
