"""`nn.MultiheadAttention` without `batch_first`, fed (batch, time, width).

Each position then looks at the other samples of the batch, not at its own sequence.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
VOCAB, LENGTH, WIDTH, STEPS = 12, 10, 32, 60


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=FIXED)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Tagger(nn.Module):
    """Marks each token that occurs again elsewhere in its sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens) + self.position)).squeeze(-1)


def make_batch(n=64):
    tokens = torch.randint(VOCAB, (n, LENGTH))
    same = tokens[:, :, None] == tokens[:, None, :]
    return tokens, (same.sum(-1) > 1).float()


def main():
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        tokens, target = make_batch()
        loss = F.binary_cross_entropy_with_logits(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")
    with torch.no_grad():
        tokens, _ = make_batch()
        change = (model(tokens)[0] - model(tokens[:1])[0]).abs().max().item()
    print(f"evidence: one sample's logits alone and in a batch differ by {change:.5f}")


if __name__ == "__main__":
    main()
