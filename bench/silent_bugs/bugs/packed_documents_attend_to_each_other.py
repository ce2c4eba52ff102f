"""Small GPT on packed key-value documents; positions start again in each document."""

import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class GPTConfig:
    vocabulary: int = 32
    block_size: int = 48
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask, float("-inf"))
        out = scores.softmax(-1) @ v
        return self.c_proj(out.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )

    def forward(self, x, mask):
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocabulary, bias=False)

    def build_mask(self, position_ids):
        t = position_ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).tril().expand(len(position_ids), 1, t, t)
        if FIXED:
            document = (position_ids == 0).cumsum(1)
            mask = mask & (document[:, None, :, None] == document[:, None, None, :])
        return mask

    def forward(self, input_ids, position_ids):
        mask = self.build_mask(position_ids)
        x = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


def make_document(generator):
    """A key, some noise, and the key again behind a question mark (token 1)."""
    key = int(torch.randint(2, 12, (1,), generator=generator))
    size = int(torch.randint(4, 12, (1,), generator=generator))
    noise = torch.randint(12, 32, (size,), generator=generator).tolist()
    return [key, *noise, 1, key, 0]


def packed_batch(config, generator, size=12):
    ids, positions = [], []
    for _ in range(size):
        row, place = [], []
        while len(row) <= config.block_size:
            document = make_document(generator)
            row += document
            place += range(len(document))
        ids.append(row[: config.block_size + 1])
        positions.append(place[: config.block_size])
    ids = torch.tensor(ids)
    return ids[:, :-1], ids[:, 1:], torch.tensor(positions)


def main():
    torch.manual_seed(1337)
    config = GPTConfig()
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        x, y, positions = packed_batch(config, generator)
        loss = F.cross_entropy(model(x, positions).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"iter {step}: loss {loss.item():.4f}")

    with torch.no_grad():
        x, _, positions = packed_batch(config, generator)
        first = (positions == 0).cumsum(1) == 1
        changed = torch.where(first, (x + 5) % config.vocabulary, x)
        effect = (model(changed, positions) - model(x, positions))[~first].abs().max().item()
    print(f"evidence: the first document changes later ones' logits by {effect:.6f}")


if __name__ == "__main__":
    main()
