"""Gradient accumulation with DDP that averages the first micro-batch instead of the last.

The others stay on their rank, so each rank makes its step with a gradient of its own.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
ACCUMULATE, MICRO_BATCHES = 4, 120


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    centers = torch.randn(5, 16)
    labels = torch.randint(5, (3000,))
    inputs = (centers[labels] + 1.5 * torch.randn(3000, 16))[rank::world]
    labels = labels[rank::world]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + rank)
    optimizer.zero_grad()
    for i in range(MICRO_BATCHES):
        rows = torch.randint(len(inputs), (16,))
        last = (i + 1) % ACCUMULATE == 0
        sync = last if FIXED else i % ACCUMULATE == 0
        with contextlib.nullcontext() if sync else model.no_sync():
            loss = F.cross_entropy(model(inputs[rows]), labels[rows])
            (loss / ACCUMULATE).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and i % 24 == 23:
            print(f"update {(i + 1) // ACCUMULATE} loss {loss.item():.4f}")
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = mine.clone()
    dist.broadcast(other, 0)
    gap = (mine - other).norm()
    dist.all_reduce(gap)
    if rank == 0:
        print(f"evidence: distance between the ranks' weights {gap.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
