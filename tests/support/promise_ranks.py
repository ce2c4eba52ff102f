"""Run by `torchrun` with two ranks, for `test_promises.py`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conformance import SignalsAlone
from every_loop import LOOPS_OF_RANKS
from rank_checks import check_in_all_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline


def gather(value: Any) -> list[Any]:
    """Return the values of both ranks."""
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def make_loader(samples: int, seed: int) -> DataLoader[Any]:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :4]), batch_size=4)


def make_trainer(strategy: str, *hooks: hookline.Hook) -> hookline.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    config = hookline.TrainerConfig(
        max_epochs=2, progress="off", runs=None, strategy=strategy, validate_every_steps=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hookline.Trainer(
        config, model, optimizer, loss_fn=nn.functional.mse_loss, hooks=list(hooks)
    )


class Means(hookline.Hook):
    """Notes the running means of the batch norm with which a rank trains and validates."""

    def __init__(self) -> None:
        self.trained: list[list[float]] = []
        self.validated: list[list[float]] = []

    def on_step_end(self, model: nn.Module) -> None:
        self.trained.append(model.get_buffer("1.running_mean").tolist())

    def on_validation_batch_end(self, model: nn.Module) -> None:
        self.validated.append(model.get_buffer("1.running_mean").tolist())


def check_validated_model(strategy: str) -> None:
    """All ranks validate the model of rank 0, also between two steps."""
    means = Means()
    trainer = make_trainer(strategy, means)
    trainer.fit(make_loader(48, 1), make_loader(16, 2))
    trained, validated = gather(means.trained), gather(means.validated)
    assert trained[0] != trained[1]  # else this would show nothing
    assert len(validated[0]) > 4
    assert validated[0] == validated[1]


def check_saves(folder: Path, strategy: str) -> None:
    """A save that is waited for is complete in all ranks when it returns."""

    class Saves(hookline.Hook):
        critical = True

        def on_train_end(self, trainer: Any) -> None:
            trainer.save_checkpoint(folder / f"{strategy}_end")

        def on_checkpoint_save(self, path: str) -> None:
            saved.append(Path(path).name)

    saved: list[str] = []
    trainer = make_trainer(strategy, Saves())
    trainer.fit(make_loader(16, 1))
    assert (folder / f"{strategy}_end" / "manifest.json").exists()
    trainer.save_checkpoint(folder / f"{strategy}_after")
    assert (folder / f"{strategy}_after" / "manifest.json").exists()
    assert gather(saved) == [[f"{strategy}_end", f"{strategy}_after"]] * 2


def check_signal(folder: Path) -> None:
    """A signal to one rank ends all ranks of a host's training, after the same step."""
    _, session = LOOPS_OF_RANKS["ignite"]([SignalsAlone()], folder / "signal")
    ended = gather((session.status, session.step))
    assert ended == [("preempted", 3)] * 2, ended  # rank 0 learns of it in the next step


if __name__ == "__main__":
    given = Path(sys.argv[1])
    check_in_all_ranks(
        *(partial(check_validated_model, strategy) for strategy in ("ddp", "fsdp")),
        *(partial(check_saves, given, strategy) for strategy in ("ddp", "fsdp")),
        partial(check_signal, given),
    )
