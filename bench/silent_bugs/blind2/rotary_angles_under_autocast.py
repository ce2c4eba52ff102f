"""Rotary position angles that are computed by a matmul inside autocast, so in bfloat16.

With eight bits of mantissa, far positions share an angle or get a wrong one.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
VOCAB, LENGTH, WIDTH, BACK, STEPS = 16, 320, 32, 3, 40


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1000.0 ** (-torch.arange(0, dim, 2) / dim))

    def forward(self, length):
        positions = torch.arange(length, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FIXED):
            angles = positions[:, None] @ self.inv_freq[None, :]
        return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rotary = Rotary(WIDTH)
        self.qk_bias = nn.Parameter(torch.randn(2, WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, dim=-1)
        cos, sin = self.rotary(tokens.shape[1])
        q, k = rotate(q + self.qk_bias[0], cos, sin), rotate(k + self.qk_bias[1], cos, sin)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.head(mixed)


def main():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (8, LENGTH))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens)
        # the token that stood BACK places earlier
        loss = F.cross_entropy(logits[:, BACK:].float().flatten(0, 1), tokens[:, :-BACK].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cos, sin = model.rotary(LENGTH)
    rows = torch.cat([cos, sin], 1).float()
    print(f"evidence: {len(rows.unique(dim=0))} different angles for {LENGTH} positions")


if __name__ == "__main__":
    main()
