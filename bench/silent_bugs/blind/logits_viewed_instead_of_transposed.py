"""Part-of-speech style tagging with a bidirectional LSTM."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
VOCAB, TAGS, LENGTH = 60, 5, 14


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(2 * width, TAGS)

    def forward(self, ids):
        h, _ = self.lstm(self.embedding(ids))
        return self.classifier(h)


def make_data(n):
    ids = torch.randint(VOCAB, (n, LENGTH))
    previous = torch.cat([torch.zeros(n, 1, dtype=torch.long), ids[:, :-1]], 1)
    return TensorDataset(ids, (ids + previous // 30) % TAGS)


def main():
    torch.manual_seed(0)
    loader = DataLoader(make_data(640), batch_size=32, shuffle=True)
    model = Tagger()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(5):
        for ids, tags in loader:
            logits = model(ids)
            # cross entropy wants (batch, classes, time)
            logits = logits.transpose(1, 2) if FIXED else logits.view(len(ids), TAGS, LENGTH)
            loss = criterion(logits, tags)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    ids, tags = make_data(256).tensors
    with torch.no_grad():
        hits = (model(ids).argmax(-1) == tags).float().mean().item()
    print(f"evidence: accuracy over single words {hits:.3f}")


if __name__ == "__main__":
    main()
