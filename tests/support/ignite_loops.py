"""A loop of Ignite with hooks, whose run is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine
from torch.nn import functional as F

import hookline


def run_ignite(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Any],
    hooks: Sequence[hookline.Hook],
) -> Path:
    """Train for an epoch; return the folder of the run."""

    def update(engine: Engine, batch: Any) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    host = Engine(update)
    session = hookline.attach(host, model=model, optimizer=optimizer, hooks=hooks, runs=folder)
    host.run(data)
    assert session.run is not None
    return session.run.path
