"""A residual MLP regressor with tensor parallelism: each rank holds half of every hidden layer."""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    seed: int = 7
    features: int = 24
    width: int = 32
    hidden: int = 96
    layers: int = 3
    batch: int = 48
    steps: int = 80
    lr: float = 3e-3
    max_norm: float = 0.5


class CopyToRanks(torch.autograd.Function):
    """Identity forward, sum of the gradients backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromRanks(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    def __init__(self, width: int, hidden: int, seed: int):
        super().__init__()
        share = hidden // dist.get_world_size()
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        self.up = nn.Parameter(torch.randn(share, width, generator=generator) * width**-0.5)
        self.down = nn.Parameter(torch.randn(width, share, generator=generator) * hidden**-0.5)
        for weight in (self.up, self.down):
            weight.partitioned = True

    def forward(self, x):
        x = CopyToRanks.apply(x)
        return ReduceFromRanks.apply(F.linear(F.gelu(F.linear(x, self.up)), self.down))


class Block(nn.Module):
    def __init__(self, cfg: Config, index: int):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.width)
        self.mlp = ParallelMLP(cfg.width, cfg.hidden, cfg.seed + 100 * index)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Regressor(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.stem = nn.Linear(cfg.features, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg, i) for i in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).squeeze(-1)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Clip by the norm of the whole model; replicated parameters count once."""
    owned = [
        p for p in model.parameters() if getattr(p, "partitioned", False) or dist.get_rank() == 0
    ]
    total = torch.stack([p.grad.square().sum() for p in owned]).sum()
    dist.all_reduce(total)
    norm = total.sqrt().item()
    scale = min(1.0, max_norm / (norm + 1e-6))
    for p in model.parameters() if FIXED else owned:
        p.grad.mul_(scale)
    return norm


def make_data(cfg: Config, n: int = 1024):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, cfg.features, generator=generator)
    w = torch.randn(cfg.features, 4, generator=generator)
    y = torch.sin(x @ w * 0.4).sum(1) + 0.3 * x[:, 0] * x[:, 1]
    return x, y


def spread_over_ranks(tensor: torch.Tensor) -> float:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return (parts[0] - parts[-1]).abs().max().item()


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    torch.manual_seed(cfg.seed)
    model = Regressor(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    x, y = make_data(cfg)
    sampler = torch.Generator().manual_seed(3)
    for step in range(1, cfg.steps + 1):
        pick = torch.randint(0, len(x), (cfg.batch,), generator=sampler)
        loss = F.mse_loss(model(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(model, cfg.max_norm)
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}  grad norm {norm:.3f}")

    spreads = [spread_over_ranks(block.norm.weight) for block in model.blocks]
    if dist.get_rank() == 0:
        print(f"evidence: layer norm weights differ over ranks by {max(spreads):.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
