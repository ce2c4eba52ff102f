"""Supervised fine-tuning on question and answer pairs; the tokenizer has no padding token."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

FIXED = "--fixed" in sys.argv


class Tokenizer:
    alphabet = "0123456789+= "

    def __init__(self):
        self.eos_token_id = len(self.alphabet)
        self.pad_token_id = None
        self.vocabulary = len(self.alphabet) + 1

    def encode(self, text):
        return [self.alphabet.index(c) for c in text]


@dataclass
class Collator:
    tokenizer: Tokenizer

    def __call__(self, rows):
        pad = self.tokenizer.pad_token_id
        longest = max(len(row) for row in rows)
        input_ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        if FIXED:
            lengths = torch.tensor([len(row) for row in rows])[:, None]
            padding = torch.arange(longest) >= lengths
        else:
            padding = input_ids == pad
        return {"input_ids": input_ids, "labels": input_ids.masked_fill(padding, -100)}


class RecurrentLM(nn.Module):
    def __init__(self, vocabulary, width=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24)
        self.rnn = nn.LSTM(24, width, num_layers=1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.rnn(self.embedding(input_ids))[0])
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


def make_rows(tokenizer, n=800):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for a, b in torch.randint(0, 60, (n, 2), generator=generator).tolist():
        rows.append([*tokenizer.encode(f"{a}+{b}={a + b}"), tokenizer.eos_token_id])
    return rows


@torch.no_grad()
def end_probability(model, tokenizer, rows):
    """Mean probability of the end token where an answer is complete."""
    total = 0.0
    for row in rows:
        logits = model(torch.tensor([row[:-1]]))
        total += logits[0, -1].softmax(-1)[tokenizer.eos_token_id].item()
    return total / len(rows)


def main():
    torch.manual_seed(8)
    tokenizer = Tokenizer()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    rows = make_rows(tokenizer)
    loader = DataLoader(rows, batch_size=32, shuffle=True, collate_fn=Collator(tokenizer))
    model = RecurrentLM(tokenizer.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    for epoch in range(4):
        for i, batch in enumerate(loader):
            loss = model(**batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 8 == 0:
                print(f"epoch {epoch} batch {i:2d} loss {loss.item():.4f}")
    probability = end_probability(model, tokenizer, rows[:50])
    print(f"evidence: probability of the end token behind an answer is {probability:.6f}")


if __name__ == "__main__":
    main()
