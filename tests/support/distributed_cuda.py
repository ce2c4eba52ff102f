"""Run by `torchrun` with two ranks: bare loops with NCCL. Usage: FOLDER cuda, or FOLDER cpu (gloo).

Gradients are averaged, and norms summed, in another order than in one process: numbers agree to
1e-4 on CUDA, whose matrix products differ with the size of a batch.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_loops import Model, Norms, batches
from rank_checks import check_in_all_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import hookline
from hookline.tensors.sharded import whole

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def train(model: nn.Module, rank: int | None, device: str, **options: Any) -> Any:
    norms = Norms()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooks = [norms, hookline.GradientMonitor(2), hookline.OptimizerMonitor(2), hookline.EMA()]
    session = hookline.attach(model, optimizer, hooks=hooks, **options)
    with session:
        for batch in batches(rank):
            model(batch.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank is not None:
            session.save_checkpoint(wait=True)
    return norms


def check(kind: str, folder: Path, device: str) -> None:
    rank = dist.get_rank()
    alone = Model().to(device)
    expected = train(alone, None, device, runs=None)
    model: Any = Model().to(device)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model)
    found = train(model, rank, device, runs=folder / kind)
    torch.testing.assert_close(found.norms, expected.norms, **TOLERANCE)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(a.detach()), b.detach(), **TOLERANCE)
    dist.barrier()
    (run,) = (folder / kind).iterdir()
    saved = hookline.checkpoint.load_checkpoint(run / "checkpoints" / "step_000006").model
    for name, value in saved.items():
        torch.testing.assert_close(value, alone.state_dict()[name].cpu(), **TOLERANCE)


if __name__ == "__main__":
    folder, device = Path(sys.argv[1]), sys.argv[2]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    check_in_all_ranks(
        *(partial(check, kind, folder, device) for kind in ("ddp", "fsdp")), backend=backend
    )
