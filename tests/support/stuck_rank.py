"""Run by `torchrun` with two ranks: one of them sleeps in a bare loop under DDP."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rank_checks import check_in_all_ranks
from torch.nn.parallel import DistributedDataParallel

import hookline
from hookline.loop import rank_sync as loop_agreement


class Sleepy(torch.nn.Linear):
    sleeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sleeps:
            time.sleep(4.0)
        return super().forward(x)


def train_with_sleep() -> None:
    """Sleep in rank 1 before forward 2 and backward 6, and in rank 0 in forward 4."""
    inner = Sleepy(2, 1)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop_agreement._SLOW_RANK_SECONDS = 1.0
    with hookline.attach(model, optimizer, runs=sys.argv[1]):
        for step in range(1, 8):
            if step == 2 and dist.get_rank() == 1:
                time.sleep(4.0)
            inner.sleeps = step == 4 and dist.get_rank() == 0
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2)).sum()
            if step == 6 and dist.get_rank() == 1:
                time.sleep(4.0)
            loss.backward()
            optimizer.step()
    run = next(iter(Path(sys.argv[1]).iterdir()))
    assert hookline.open_run(run).manifest["status"] == "completed" or dist.get_rank()


if __name__ == "__main__":
    check_in_all_ranks(train_with_sleep)
