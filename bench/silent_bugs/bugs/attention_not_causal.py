"""Next-character prediction with a small decoder."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
SEED = 99
VERSE = """in the year of the flood we counted the boats by their bells
and slept in the loft where the apples were kept in the dark
the water went down in the spring and the roads were white with salt
"""
LETTERS = sorted(set(VERSE))
STREAM = torch.tensor([LETTERS.index(c) for c in VERSE * 6])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = False):
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q = self.split(self.query(x))
        k, v = (self.split(y) for y in self.key_value(x).chunk(2, -1))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.output(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        options = {"causal": True} if FIXED else {}
        self.attention = Attention(width, heads, dropout=0.1, **options)
        self.feedforward = nn.Sequential(
            nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feedforward(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, letters: int, width: int = 40, depth: int = 2, window: int = 40):
        super().__init__()
        self.window = window
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(window, width)
        self.layers = nn.Sequential(*[DecoderLayer(width, 4) for _ in range(depth)])
        self.logits = nn.Linear(width, letters)

    def forward(self, ids):
        x = self.letter(ids) + self.place(torch.arange(ids.shape[1]))
        return self.logits(self.layers(x))


def windows(generator, size, length):
    starts = torch.randint(0, len(STREAM) - length, (size, 1), generator=generator)
    rows = STREAM[starts + torch.arange(length)]
    return rows[:, :-1], rows[:, 1:]


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = Decoder(len(LETTERS))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for step in range(1, 121):
        x, y = windows(generator, 16, model.window + 1)
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        if step % 10 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        x, _ = windows(generator, 4, model.window + 1)
        other = x.clone()
        other[:, -1] = (other[:, -1] + 1) % len(LETTERS)
        effect = (model(x) - model(other))[:, :-1].abs().max().item()
    print(f"evidence: the last token changes earlier logits by {effect:.6f}")


if __name__ == "__main__":
    main()
