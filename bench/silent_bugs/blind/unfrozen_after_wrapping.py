"""Gradual unfreezing under DistributedDataParallel: the head first, then the backbone."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
UNFREEZE, STEPS = 20, 60


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def distance(module):
    worst = 0.0
    for p in module.parameters():
        copies = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, p.detach())
        worst = max(worst, (copies[0] - copies[1]).abs().max().item())
    return worst


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    truth = torch.randn(16, 4)
    model = Model()
    model.backbone.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(1, STEPS + 1):
        if step == UNFREEZE + 1:
            model.backbone.requires_grad_(True)
            if FIXED:
                ddp = DistributedDataParallel(model)
        x = torch.randn(32, 16, generator=generator)
        y = (x @ truth).argmax(1)
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    gap = distance(model.backbone)
    if rank == 0:
        print(f"evidence: backbones of the two ranks differ by {gap:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
