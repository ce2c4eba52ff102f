"""Packed sequences with context parallelism: each of two ranks holds half of the sequence."""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    vocabulary: int = 24
    width: int = 32
    heads: int = 4
    layers: int = 2
    length: int = 64
    batch: int = 8
    steps: int = 60
    lr: float = 4e-3


class GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; the gradient is summed and cut to the own part."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


class ContextParallelAttention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)

    def forward(self, x, documents):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)
        offset = dist.get_rank() * t
        rows = torch.arange(offset, offset + t)[:, None]
        mask = (rows >= torch.arange(k.shape[2])).expand(b, 1, -1, -1)
        if FIXED:
            own = documents[:, offset : offset + t]
            mask = mask & (own[:, :, None] == documents[:, None, :]).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocabulary, cfg.width)
        self.positions = nn.Embedding(cfg.length, cfg.width)
        self.attention = nn.ModuleList(ContextParallelAttention(cfg) for _ in range(cfg.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(cfg.width) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.width, cfg.vocabulary)

    def forward(self, tokens, positions, documents):
        x = self.tokens(tokens) + self.positions(positions)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x), documents)
        return self.head(x)


def pack(cfg: Config, generator):
    """Documents of a repeated random motif, packed without padding."""
    rows = []
    for _ in range(cfg.batch):
        tokens, positions, documents = [], [], []
        while len(tokens) < cfg.length + 1:
            motif = torch.randint(1, cfg.vocabulary, (4,), generator=generator).tolist()
            size = int(torch.randint(10, 24, (1,), generator=generator))
            tokens += [motif[i % 4] for i in range(size - 1)] + [0]
            positions += range(size)
            documents += [len(set(documents))] * size
        rows.append([part[: cfg.length + 1] for part in (tokens, positions, documents)])
    return torch.tensor(rows).unbind(1)


def own_half(x):
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def compute_logits(model, tokens, positions, documents):
    inputs, places, groups = tokens[:, :-1], positions[:, :-1], documents[:, :-1]
    return model(own_half(inputs), own_half(places), groups)


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    torch.manual_seed(5)
    model = Decoder(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    generator = torch.Generator().manual_seed(6)
    for step in range(1, cfg.steps + 1):
        tokens, positions, documents = pack(cfg, generator)
        logits = compute_logits(model, tokens, positions, documents)
        loss = F.cross_entropy(logits.flatten(0, 1), own_half(tokens[:, 1:]).flatten())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")

    with torch.no_grad():
        tokens, positions, documents = pack(cfg, generator)
        before = compute_logits(model, tokens, positions, documents)
        changed = torch.where(documents == 0, (tokens + 1) % cfg.vocabulary, tokens)
        after = compute_logits(model, changed, positions, documents)
        later = own_half(documents[:, :-1]) > 0
        effect = (after - before).abs().amax(-1)[later].max()
        dist.all_reduce(effect, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"evidence: the first document changes later ones' logits by {effect.item():.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
