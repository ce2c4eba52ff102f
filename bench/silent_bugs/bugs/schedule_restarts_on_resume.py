"""Warm-up and cosine decay over the whole run; a checkpoint is written at two thirds."""

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    steps: int = 90
    stop_at: int = 60
    warmup: int = 10
    lr: float = 4e-3
    seed: int = 44


class Mixer(nn.Module):
    """Two token-mixing layers that sort six numbers into ranks."""

    def __init__(self, n=6, width=32):
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.mix = nn.ModuleList(nn.Linear(n, n) for _ in range(2))
        self.channel = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, n)

    def forward(self, x):
        x = self.embed(x.unsqueeze(-1))
        for mix, channel in zip(self.mix, self.channel, strict=True):
            x = x + F.gelu(mix(x.transpose(1, 2))).transpose(1, 2)
            x = x + F.gelu(channel(x))
        return self.head(x)


def build(cfg: Config):
    torch.manual_seed(cfg.seed)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))

    def factor(step):
        if step < cfg.warmup:
            return (step + 1) / cfg.warmup
        done = (step - cfg.warmup) / (cfg.steps - cfg.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(cfg, model, optimizer, scheduler, start, stop):
    rates = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(1000 + step)
        x = torch.rand(64, 6, generator=generator)
        ranks = x.argsort(1).argsort(1)
        loss = F.cross_entropy(model(x).transpose(1, 2), ranks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return rates


def main():
    cfg = Config()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step60.pt"
        model, optimizer, scheduler = build(cfg)
        before = train(cfg, model, optimizer, scheduler, 0, cfg.stop_at)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "step": cfg.stop_at}, path)

        model, optimizer, scheduler = build(cfg)
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if FIXED:
            scheduler.load_state_dict(state["scheduler"])
    after = train(cfg, model, optimizer, scheduler, state["step"], cfg.steps)
    print(f"evidence: lr {before[-1]:.6f} before resuming, {after[1]:.6f} two steps later")


if __name__ == "__main__":
    main()
