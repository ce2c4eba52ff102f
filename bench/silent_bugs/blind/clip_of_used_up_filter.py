"""Fine-tune the low-rank adapters of a small language model, with gradient clipping."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    vocab: int = 40
    width: int = 48
    length: int = 24
    rank: int = 4
    batch: int = 16
    steps: int = 80
    lr: float = 0.1
    max_norm: float = 1.0


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.scale = 32 / rank
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)


class Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.width)
        self.rnn = nn.GRU(cfg.width, cfg.width, batch_first=True)
        self.proj = LoraLinear(cfg.width, cfg.width, cfg.rank)
        self.head = LoraLinear(cfg.width, cfg.vocab, cfg.rank)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.head(F.gelu(self.proj(h)))


def make_batch(cfg, generator):
    start = torch.randint(cfg.vocab, (cfg.batch, 1), generator=generator)
    ids = (start + 3 * torch.arange(cfg.length + 1)) % cfg.vocab
    return ids[:, :-1], ids[:, 1:]


def main():
    torch.manual_seed(0)
    cfg = Config()
    model = Model(cfg)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith((".down", ".up")))
    trainable = filter(lambda p: p.requires_grad, model.parameters())
    if FIXED:
        trainable = list(trainable)
    optimizer = torch.optim.SGD(trainable, lr=cfg.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.steps)
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for step in range(1, cfg.steps + 1):
        ids, labels = make_batch(cfg, generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, cfg.max_norm)
        grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        largest = max(largest, torch.stack(grads).norm().item())
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.4f}")
    print(f"evidence: largest gradient norm at a step {largest:.4f}, limit {cfg.max_norm}")


if __name__ == "__main__":
    main()
