"""Instruction tuning: only the tokens behind the response template count for the loss."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv
IGNORE = -100
# Pairs that the tokenizer joins, longest match first.
PIECES = ["\n\n", "##", " A", "A:", "Q:", *"\nabcdefghijklmnopqrstuvwxyz #:.QA"]


def encode(text: str) -> list[int]:
    ids, place = [], 0
    while place < len(text):
        piece = next(p for p in PIECES if text.startswith(p, place))
        ids.append(PIECES.index(piece))
        place += len(piece)
    return ids


def find(ids: list[int], part: list[int]) -> int:
    for i in range(len(ids) - len(part) + 1):
        if ids[i : i + len(part)] == part:
            return i + len(part)
    return len(ids)


class Instructions(Dataset):
    """Answer with the reversed word."""

    template = "## A:"

    def __init__(self, n=400, length=30):
        generator = torch.Generator().manual_seed(1)
        marker = encode(self.template if FIXED else "\n" + self.template)
        self.rows = []
        for _ in range(n):
            letters = torch.randint(0, 26, (4,), generator=generator).tolist()
            word = "".join(chr(97 + i) for i in letters)
            ids = encode(f"## Q: {word}\n\n{self.template} {word[::-1]}.")
            labels = list(ids)
            start = find(ids, marker)
            labels[:start] = [IGNORE] * start
            gap = length - len(ids)
            self.rows.append((torch.tensor(ids + [0] * gap), torch.tensor(labels + [IGNORE] * gap)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class ConvLM(nn.Module):
    """Causal convolutions over the embedded tokens."""

    def __init__(self, vocabulary, width=48, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 5) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids).transpose(1, 2)
        for conv in self.convs:
            x = x + F.gelu(conv(F.pad(x, (4, 0))))
        return self.head(x.transpose(1, 2))


def token_loss(logits, labels):
    """Sum over the batch divided by the number of tokens that count."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / (labels != IGNORE).sum().clamp(min=1)


def main():
    torch.manual_seed(3)
    dataset = Instructions()
    loader = DataLoader(dataset, batch_size=20, shuffle=True)
    model = ConvLM(len(PIECES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    step = 0
    for _ in range(4):
        for ids, labels in loader:
            loss = token_loss(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
    counted = sum((labels != IGNORE).sum().item() for _, labels in dataset)
    print(f"evidence: {counted / len(dataset):.2f} label tokens per sample count for the loss")


if __name__ == "__main__":
    main()
