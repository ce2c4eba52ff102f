"""Two towers with in-batch negatives from all ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
BATCH, WIDTH, SCALE = 16, 24, 10.0


class GatherLayer(torch.autograd.Function):
    """all_gather whose backward hands each rank the sum of the gradients of its part."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather(x):
    if FIXED:
        return GatherLayer.apply(x)
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def tower(inputs):
    return nn.Sequential(nn.Linear(inputs, 48), nn.GELU(), nn.Linear(48, WIDTH))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = tower(10), tower(14)

    def forward(self, q, d):
        return F.normalize(self.query(q), dim=-1), F.normalize(self.document(d), dim=-1)


def contrastive(q, documents, first):
    labels = first + torch.arange(len(q))
    return F.cross_entropy(SCALE * q @ documents.T, labels)


def pairs(generator, n):
    a = torch.randn(6, 10, generator=torch.Generator().manual_seed(5))
    b = torch.randn(6, 14, generator=torch.Generator().manual_seed(6))
    z = torch.randn(n, 6, generator=generator)
    return z @ a, z @ b


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(7)
    error = 0.0
    for step in range(1, 61):
        all_q, all_d = pairs(generator, 2 * BATCH)
        part = slice(rank * BATCH, (rank + 1) * BATCH)
        q, d = model(all_q[part], all_d[part])
        loss = contrastive(q, gather(d), rank * BATCH)
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            whole = contrastive(*model.module(all_q, all_d), 0)
            weight = model.module.document[0].weight
            (exact,) = torch.autograd.grad(whole, weight)
            error = ((weight.grad - exact).norm() / exact.norm()).item()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(f"evidence: relative error of the document tower's gradient {error:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
