"""Gradient accumulation weighted by tokens: sums over micro-batches, divided by all tokens."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, PAD, MICRO = 16, 32, 0, 3


class Tagger(nn.Module):
    """Says for each token whether it was seen before in the sentence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        self.gru = nn.GRU(WIDTH, 48, batch_first=True)
        self.out = nn.Linear(48, 2)

    def forward(self, ids):
        return self.out(self.gru(self.embedding(ids))[0])


def sentence(length):
    ids = torch.randint(1, VOCAB, (length,))
    seen = [int(token in ids[:i].tolist()) for i, token in enumerate(ids.tolist())]
    return ids, torch.tensor(seen)


def micro_batch(size=12):
    pairs = [sentence(int(torch.randint(3, 20, ()))) for _ in range(size)]
    ids = nn.utils.rnn.pad_sequence([p[0] for p in pairs], True, PAD)
    labels = nn.utils.rnn.pad_sequence([p[1] for p in pairs], True, -100)
    return ids, labels


def main():
    torch.manual_seed(0)
    pool = [[micro_batch() for _ in range(MICRO)] for _ in range(60)]
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, micro_batches in enumerate(pool, start=1):
        tokens = sum((labels != -100).sum() for _, labels in micro_batches)
        optimizer.zero_grad()
        total = 0.0
        for ids, labels in micro_batches:
            logits = model(ids)
            summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = summed / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {total:.3f} over {tokens.item()} tokens")
    model.eval()
    ids, labels = micro_batch(100)
    with torch.no_grad():
        right = model(ids).argmax(-1) == labels
    print(f"accuracy {right[labels != -100].float().mean():.3f}")


if __name__ == "__main__":
    main()
