"""GPT-style model; the config's standard deviation is meant for every weight matrix."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    vocabulary: int = 64
    context: int = 24
    width: int = 48
    heads: int = 3
    layers: int = 2
    init_std: float = 0.02
    lr: float = 2e-3
    steps: int = 90


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attention = nn.MultiheadAttention(cfg.width, cfg.heads, batch_first=True)
        self.up, self.down = (
            nn.Linear(cfg.width, 4 * cfg.width),
            nn.Linear(4 * cfg.width, cfg.width),
        )
        self.norm1, self.norm2 = nn.LayerNorm(cfg.width), nn.LayerNorm(cfg.width)

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.std = cfg.init_std
        self.tokens = nn.Embedding(cfg.vocabulary, cfg.width)
        self.places = nn.Embedding(cfg.context, cfg.width)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.init_module)
        mask = torch.ones(cfg.context, cfg.context, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def init_module(self, module):
        kinds = (nn.Linear, nn.Embedding) if FIXED else nn.Linear
        if isinstance(module, kinds) and module is not self.head:
            nn.init.normal_(module.weight, std=self.std)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.tokens(ids) + self.places.weight[:t]
        for layer in self.layers:
            x = layer(x, self.mask[:t, :t])
        return self.head(self.norm(x))


def arithmetic_rows(cfg, generator, size=24):
    """Sequences that grow by a constant step modulo the vocabulary."""
    first = torch.randint(0, cfg.vocabulary, (size, 1), generator=generator)
    stride = torch.randint(1, 9, (size, 1), generator=generator)
    return (first + stride * torch.arange(cfg.context + 1)) % cfg.vocabulary


def main():
    cfg = Config()
    torch.manual_seed(41)
    generator = torch.Generator().manual_seed(42)
    model = Transformer(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    first_loss = None
    for step in range(1, cfg.steps + 1):
        rows = arithmetic_rows(cfg, generator)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        first_loss = first_loss or loss.item()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    uniform = torch.tensor(float(cfg.vocabulary)).log().item()
    print(f"evidence: first loss {first_loss:.3f}, of a uniform guess {uniform:.3f}")


if __name__ == "__main__":
    main()
