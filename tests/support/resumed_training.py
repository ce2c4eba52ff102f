"""A training that failed, and the same training again, to be resumed from its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import ModelCheckpoint, Trainer, TrainerConfig


class Fail(hookline.Hook):
    """End training within the second epoch, as a crash would."""

    critical = True

    def on_step_end(self, step: int) -> None:
        if step == 5:
            raise RuntimeError("the process ends here")


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator)
    return DataLoader(
        TensorDataset(x, x[:, :4]),
        batch_size=8,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )


def make_trainer(
    runs: Path,
    *hooks: hookline.Hook,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    groups: int = 1,
    scheduler: Callable[..., Any] | None = torch.optim.lr_scheduler.StepLR,
    **fields: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = Net() if model is None else model
    parameters = list(model.parameters())
    split = [parameters] if groups == 1 else [parameters[:2], parameters[2:]]
    own = optimizer([{"params": part} for part in split], lr=0.01)
    return Trainer(
        TrainerConfig(runs=runs, progress="off", max_epochs=4, seed=7, **fields),
        model,
        [own],
        schedulers=None if scheduler is None else [scheduler(own, 2)],
        hooks=[ModelCheckpoint(every_n_steps=2, save_top_k=-1), hookline.EMA(0.9), *hooks],
    )


def save_run(folder: Path) -> Path:
    """Return the folder of a run that failed after step 5, in the middle of an epoch."""
    with pytest.raises(hookline.HookFailedError):
        make_trainer(folder / "runs", Fail()).fit(loader())
    (run,) = (folder / "runs").iterdir()
    return run


def newest(run: Path) -> Path:
    return hookline.checkpoint.find_checkpoint(run)


def text_of(*objects: Any) -> str:
    """Return the states of models, optimizers and schedulers as a text."""
    states = [one.state_dict() for one in objects]
    return json.dumps(states, default=lambda value: getattr(value, "tolist", value.__str__)())


def objects_of(trainer: Trainer) -> str:
    return text_of(trainer.model, *trainer.optimizers, *trainer.schedulers)
