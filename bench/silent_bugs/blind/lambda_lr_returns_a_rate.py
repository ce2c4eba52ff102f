"""Train a small GPT with linear warm-up and decay."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

FIXED = "--fixed" in sys.argv
LR, WARMUP, STEPS = 2e-3, 10, 80
VOCAB, WIDTH, LENGTH, BATCH = 32, 32, 24, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def rate(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (STEPS - step) / (STEPS - WARMUP)


def batches(generator):
    while True:
        start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        ids = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
        yield ids[:, :-1], ids[:, 1:]


def main():
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    factor = (lambda step: rate(step) / LR) if FIXED else rate
    scheduler = LambdaLR(optimizer, factor)
    peak = 0.0
    data = batches(torch.Generator().manual_seed(3))
    for step in range(1, STEPS + 1):
        ids, labels = next(data)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        peak = max(peak, optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")
    print(f"evidence: highest learning rate used {peak:.2e}, wanted {LR:.2e}")


if __name__ == "__main__":
    main()
