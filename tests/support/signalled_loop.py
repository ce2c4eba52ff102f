"""Run by `torchrun` with two ranks: a bare loop in which one rank alone gets SIGTERM.

Each rank writes how its session ended. Without a signal, the run is continued if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline

FOLDER, KIND, WHEN, WHO = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
STEPS, AT = 6, 3
stopped: list[int] = []


def send(when: str, step: int) -> None:
    if when == WHEN and step == AT and dist.get_rank() == WHO:
        os.kill(os.getpid(), signal.SIGTERM)


class Signals(hookline.Hook):
    def on_after_backward(self, step: int) -> None:
        send("backward", step + 1)

    def on_step_end(self, step: int) -> None:
        send("step", step)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = fully_shard(inner) if KIND == "fsdp" else DistributedDataParallel(inner)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    with session:
        for step in range(first, STEPS):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            send("data", step)
            if stopped:
                return
            model(torch.randn(4, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if KIND == "handler":  # the program's own, which lets the loop end by itself
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    model, optimizer = make()
    hooks = [Signals(), hookline.ModelCheckpoint(every_n_steps=100)]
    session = hookline.attach(model, optimizer, hooks=hooks, runs=FOLDER / "runs")
    start = session.load_checkpoint()
    first = 0 if start is None else start.step
    try:
        train(session, model, optimizer, first)
    finally:
        ended = {"status": session.status, "step": session.step, "first": first}
        (FOLDER / f"{rank}.json").write_text(json.dumps(ended))
    torch.save(hookline.full_tensor(model.state_dict()), FOLDER / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
