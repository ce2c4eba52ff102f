"""Linear warm-up that starts at lr 0: the first step changes no weight."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

WARMUP, TOTAL = 20, 100


def factor(step):
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, tokens=9, width=24, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.blocks = nn.Sequential(MixerBlock(tokens, width), MixerBlock(tokens, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def sample(patterns, n=64):
    y = torch.randint(0, len(patterns), (n,))
    return patterns[y] + 1.5 * torch.randn(n, 1, 12, 12), y


def main():
    torch.manual_seed(0)
    patterns = torch.randn(5, 1, 12, 12)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = LambdaLR(optimizer, factor)
    for step in range(TOTAL):
        x, y = sample(patterns)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        lr = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, lr {lr:.5f}")
    with torch.no_grad():
        x, y = sample(patterns, 500)
        print(f"accuracy {(model.eval()(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
