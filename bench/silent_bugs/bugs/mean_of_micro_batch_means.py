"""Causal language model on lines of different lengths with gradient accumulation."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

IGNORE = -100


@dataclass
class Config:
    vocab: int = 16
    dim: int = 32
    heads: int = 2
    longest: int = 40
    micro_batch: int = 4
    accumulate: int = 4
    steps: int = 50
    lr: float = 3e-3


class Lines(Dataset):
    """Counting sequences: some have three tokens, some forty."""

    def __init__(self, count, cfg):
        gen = torch.Generator().manual_seed(70)
        self.lines = []
        for _ in range(count):
            short = torch.rand(1, generator=gen).item() < 0.6
            length = torch.randint(3, 6, (1,), generator=gen).item() if short else cfg.longest
            start = torch.randint(0, cfg.vocab, (1,), generator=gen).item()
            stride = 1 if short else 3
            self.lines.append((start + stride * torch.arange(length)) % cfg.vocab)

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return self.lines[i]


def collate(lines):
    inputs = pad_sequence([line[:-1] for line in lines], batch_first=True)
    labels = pad_sequence([line[1:] for line in lines], batch_first=True, padding_value=IGNORE)
    return inputs, labels


class TinyGPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.longest, cfg.dim)
        self.ln1, self.ln2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.dim)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.dim, 4 * cfg.dim), nn.GELU(), nn.Linear(4 * cfg.dim, cfg.dim)
        )
        self.head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, ids):
        b, t = ids.shape
        x = self.embed(ids) + self.pos(torch.arange(t))
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, -1))
        return self.head(x + self.mlp(self.ln2(x)))


def token_loss(logits, labels, reduction):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction=reduction
    )


def backward_window(model, window, fixed):
    tokens = sum((labels != IGNORE).sum() for _, labels in window)
    total, summed = 0.0, 0.0
    for inputs, labels in window:
        logits = model(inputs)
        if fixed:
            loss = token_loss(logits, labels, "sum") / tokens
        else:
            loss = token_loss(logits, labels, "mean") / len(window)
        loss.backward()
        total += loss.item()
        summed += token_loss(logits.detach(), labels, "sum").item()
    return total, summed / tokens.item()


def endless(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    cfg = Config()
    torch.manual_seed(70)
    loader = DataLoader(
        Lines(600, cfg), batch_size=cfg.micro_batch, shuffle=True, collate_fn=collate
    )
    model = TinyGPT(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    data = endless(loader)

    gaps = []
    for step in range(1, cfg.steps + 1):
        window = [next(data) for _ in range(cfg.accumulate)]
        optimizer.zero_grad()
        loss, per_token = backward_window(model, window, args.fixed)
        optimizer.step()
        gaps.append(abs(loss - per_token))
        if step % 5 == 0:
            print(f"step {step} loss {loss:.4f}")

    mean = sum(gaps) / len(gaps)
    print(f"evidence: mean distance of the loss from the mean over all tokens {mean:.6f}")


if __name__ == "__main__":
    main()
