"""Adapter tuning of a small causal model with activation checkpointing."""

import sys
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    vocab: int = 24
    dim: int = 32
    depth: int = 3
    length: int = 20
    rank: int = 4
    steps: int = 60
    batch: int = 16


class AdaptedLinear(nn.Module):
    def __init__(self, inp, out, rank):
        super().__init__()
        self.base = nn.Linear(inp, out)
        self.lora_down = nn.Linear(inp, rank, bias=False)
        self.lora_up = nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.lora_up(self.lora_down(x))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm = nn.RMSNorm(cfg.dim)
        self.qkv = AdaptedLinear(cfg.dim, 3 * cfg.dim, cfg.rank)
        self.mlp = nn.Sequential(
            nn.RMSNorm(cfg.dim), AdaptedLinear(cfg.dim, cfg.dim, cfg.rank), nn.SiLU()
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Parameter(0.02 * torch.randn(cfg.length, cfg.dim))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.depth))
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=not FIXED)
        return self.lm_head(x)


def mark_trainable(model):
    for name, param in model.named_parameters():
        param.requires_grad = "lora_" in name or name.startswith("lm_head")
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trainable parameters: {count} of {sum(p.numel() for p in model.parameters())}")


def copy_task(cfg, gen):
    half = torch.randint(0, cfg.vocab, (cfg.batch, cfg.length // 4 + 1), generator=gen)
    return half.repeat(1, 5)[:, : cfg.length + 1]


def main():
    torch.manual_seed(6)
    cfg = Config()
    gen = torch.Generator().manual_seed(6)
    model = Model(cfg)
    mark_trainable(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))

    for step in range(1, cfg.steps + 1):
        ids = copy_task(cfg, gen)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, cfg.vocab), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    size = sum(p.norm().item() for n, p in model.named_parameters() if "lora_up" in n)
    print(f"evidence: sum of the norms of lora_up {size:.5f}")


if __name__ == "__main__":
    main()
