"""A decoder in bfloat16 with rotary positions and sequences of 640 tokens."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
WIDTH, HEADS, LENGTH, VOCAB = 32, 2, 640, 24


class Rotary(nn.Module):
    def __init__(self, width, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, width, 2).float() / width))

    def angles(self, length):
        if FIXED:
            t = torch.arange(length, dtype=torch.float32)
            return torch.outer(t, self.inv_freq.float())
        t = torch.arange(length).type_as(self.inv_freq)
        return torch.outer(t, self.inv_freq)

    def forward(self, x):
        angles = self.angles(x.shape[-2])
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rotary = Rotary(WIDTH // HEADS)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, WIDTH))
        return self.head(x + self.mlp(self.norm2(x)))


def main():
    torch.manual_seed(0)
    model = Decoder().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(1, 41):
        start = torch.randint(VOCAB, (2, 1))
        ids = (start + 5 * torch.arange(LENGTH + 1)) % VOCAB
        logits = model(ids[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    different = len(model.rotary.angles(LENGTH)[:, 0].unique())
    print(f"evidence: different positions {different} of {LENGTH}")


if __name__ == "__main__":
    main()
