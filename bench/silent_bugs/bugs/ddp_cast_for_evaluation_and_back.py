"""Fit a physical law with DDP; validation is done in double precision every 20 steps."""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
STEPS, EVAL_EVERY, BATCH = 90, 20, 64


def pendulum(n: int, generator: torch.Generator):
    """Angle after a time t for a start angle and a length."""
    raw = torch.rand(n, 3, generator=generator)
    start, length, time = raw[:, 0] * 0.8, raw[:, 1] + 0.5, raw[:, 2] * 2
    angle = start * torch.cos(torch.sqrt(9.81 / length) * time)
    return raw * 2 - 1, angle.unsqueeze(1) * 2


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(x))


@torch.no_grad()
def validate(model: DistributedDataParallel, x: torch.Tensor, y: torch.Tensor) -> float:
    """Mean squared error in float64, where rounding does not matter."""
    if FIXED:
        net = copy.deepcopy(model.module).double()
        return (net(x.double()) - y.double()).square().mean().item()
    model.double()
    error = (model.module(x.double()) - y.double()).square().mean().item()
    model.float()
    return error


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    local = torch.Generator().manual_seed(100 + rank)
    valid = pendulum(256, torch.Generator().manual_seed(1))
    for step in range(1, STEPS + 1):
        x, y = pendulum(BATCH, local)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 and rank == 0:
            print(f"{step:3d} loss {loss.item():.5f}")
        if step % EVAL_EVERY == 0:
            error = validate(model, *valid)
            if rank == 0:
                print(f"{step:3d} validation error {error:.8f}")

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"evidence: parameters differ over ranks by {(high - low).max().item():.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
