"""Fine-tune a small transformer classifier with low-rank adapters."""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
FIXED = parser.parse_args().fixed


@dataclass
class Config:
    vocab: int = 40
    dim: int = 48
    heads: int = 4
    layers: int = 2
    length: int = 24
    classes: int = 4
    rank: int = 4
    lr: float = 3e-3
    steps: int = 80
    batch: int = 32


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.q_proj = nn.Linear(cfg.dim, cfg.dim)
        self.k_proj = nn.Linear(cfg.dim, cfg.dim)
        self.v_proj = nn.Linear(cfg.dim, cfg.dim)
        self.o_proj = nn.Linear(cfg.dim, cfg.dim)

    def forward(self, x):
        b, t, d = x.shape
        split = (b, t, self.heads, d // self.heads)
        q = self.q_proj(x).view(split).transpose(1, 2)
        k = self.k_proj(x).view(split).transpose(1, 2)
        v = self.v_proj(x).view(split).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.attn = Attention(cfg)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.dim, 2 * cfg.dim), nn.GELU(), nn.Linear(2 * cfg.dim, cfg.dim)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.score = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.score(self.norm(x).mean(dim=1))


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha=8.0):
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def inject_lora(model, rank, targets=("q_proj", "v_proj")):
    for name, param in model.named_parameters():
        param.requires_grad = name.startswith("score.")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets:
                setattr(module, name, LoRALinear(child, rank))
    return model


def make_data(cfg, count):
    ids = torch.randint(0, cfg.vocab, (count, cfg.length))
    labels = (ids < cfg.vocab // 4).sum(dim=1).clamp(4, 7) - 4
    return TensorDataset(ids, labels)


def make_optimizer(model, cfg):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=cfg.lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=cfg.steps)
    return optimizer, scheduler


def main():
    torch.manual_seed(0)
    cfg = Config()
    loader = DataLoader(make_data(cfg, 640), batch_size=cfg.batch, shuffle=True)
    model = Classifier(cfg)
    if FIXED:
        model = inject_lora(model, cfg.rank)
        optimizer, scheduler = make_optimizer(model, cfg)
    else:
        optimizer, scheduler = make_optimizer(model, cfg)
        model = inject_lora(model, cfg.rank)

    step = 0
    model.train()
    while step < cfg.steps:
        for ids, labels in loader:
            loss = F.cross_entropy(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
            if step == cfg.steps:
                break

    largest = max(p.abs().max().item() for n, p in model.named_parameters() if "lora_b" in n)
    print(f"evidence: largest entry of all lora_b matrices {largest:.6f}")


if __name__ == "__main__":
    main()
