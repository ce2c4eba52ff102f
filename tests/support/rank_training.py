"""Trainings in two processes for `test_ranks.py`, started with torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import distributed_training as shared
import torch
import torch.distributed as dist
from distributed_training import RANK, Once, describe, loaders, make
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import ModelCheckpoint


class Failing(hookline.Hook):
    """Fails in rank 1."""

    def on_step_end(self) -> None:
        if RANK == 1:
            raise ValueError("only in rank 1")


def watch(folder: Path) -> dict[str, Any]:
    """A hook that fails in rank 1, and a hook that saves."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hookline").addHandler(handler)
    trainer, _ = make(folder, max_epochs=1)
    trainer.add_hook(Failing())
    trainer.add_hook(ModelCheckpoint(every_n_steps=3, save_last=True, folder=folder / "saved"))
    logging.getLogger("hookline").warning("the same in all ranks")
    trainer.fit(loaders()[0])
    saved = sorted(path.name for path in (folder / "saved").iterdir())
    trainer.save_checkpoint(folder / "after")
    return {"lines": lines, "saved": saved, "after": (folder / "after" / "manifest.json").exists()}


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[int] = []

    def start(self, run: Any) -> None:
        self.calls.append("start")

    def log(self, values: Any) -> None:
        self.steps += [value.step for value in values if value.name == "train/loss"]

    def finish(self, status: str) -> None:
        self.calls.append(status)


def track(folder: Path) -> dict[str, Any]:
    """A trainer and a session with a tracker."""
    own, attached = Kept(), Kept()
    made, _ = make(None)
    trainer = hookline.Trainer(
        hookline.TrainerConfig(max_steps=3, progress="off", runs=folder / "trainer"),
        made.model,
        made.optimizers[0],
        loss_fn=made.loss_fn,
        trackers=[own],
    )
    trainer.fit(loaders()[0])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookline.attach(model, optimizer, trackers=[attached], runs=folder / "session"):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: [t.calls, t.steps] for name, t in (("own", own), ("attached", attached))}


def change_size(folder: Path) -> dict[str, Any]:
    """Save in the middle of an epoch, and continue a checkpoint that one process has saved."""
    trainer, seen = make(folder / "two", max_steps=14)
    trainer.add_hook(ModelCheckpoint(every_n_steps=1, save_top_k=-1, folder=folder / "saved"))
    trainer.fit(loaders()[0])
    whole = describe(trainer, seen)
    resumed = {}
    for name in ("middle", "end"):
        trainer, seen = make(None, max_steps=14)
        trainer.fit(loaders()[0], resume_from=folder.parent / "one" / name)
        resumed[name] = describe(trainer, seen)
    return {"whole": whole, **resumed}


def make_long(folder: Path, *, sleeps: bool) -> tuple[hookline.Trainer, Any, Any, Any]:
    """A training that takes long enough to be interrupted, in training or in validation."""
    trainer, seen = make(folder, dropout=0.3, max_epochs=3, accumulate=2)
    trainer.add_hook(ModelCheckpoint(every_n_steps=2, save_top_k=1))
    train, _ = loaders(200)
    x, y = torch.randn(60, 8), torch.randn(60, 4)
    workers = {"num_workers": 1, "persistent_workers": True}
    if sleeps:
        trainer.add_hook(Slow())
    train = DataLoader(train.dataset, batch_size=5, shuffle=True, **workers)  # type: ignore[arg-type]
    return trainer, seen, train, DataLoader(TensorDataset(x, y), batch_size=2)


class Slow(hookline.Hook):
    """Makes the second validation slow; it says when it runs."""

    def on_validation_batch_start(self, epoch: int, batch_idx: int) -> None:
        if epoch == 1:
            time.sleep(0.2)
            if RANK == 0 and batch_idx == 1:
                print("validating", flush=True)


def interrupt(folder: Path) -> dict[str, Any]:
    trainer, seen, train, val = make_long(folder, sleeps=True)
    trainer.fit(train, val, resume_from="auto")
    print("status", RANK, trainer.status, trainer.stop_signal, flush=True)
    if trainer.status == "preempted":
        sys.exit(128 + signal.SIGTERM)
    return describe(trainer, seen)


class Validates(hookline.Hook):
    """Knows whether a validation is running."""

    is_running = is_signaled = False

    def on_validation_start(self) -> None:
        self.is_running = True

    def on_validation_end(self) -> None:
        self.is_running = False


def late_signal(folder: Path) -> dict[str, Any]:
    """Rank 1 gets a signal in a validation, right after the ranks agreed that there is none."""
    trainer, seen, train, val = make_long(folder, sleeps=False)
    validates = Validates()
    trainer.add_hook(validates)

    def signal_after(collective: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            result = collective(*arguments, **options)
            if RANK == 1 and validates.is_running and not validates.is_signaled:
                validates.is_signaled = True
                signal.raise_signal(signal.SIGUSR1)
            return result

        return call

    own = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_object")}
    for name, collective in own.items():
        setattr(dist, name, signal_after(collective))
    trainer.fit(train, val)
    for name, collective in own.items():
        setattr(dist, name, collective)
    ended = {"status": trainer.status, "signal": trainer.stop_signal, "step": trainer.step}
    trainer, seen, train, val = make_long(folder, sleeps=False)
    trainer.fit(train, val, resume_from="auto")
    return {**describe(trainer, seen), **ended}


def die(folder: Path) -> dict[str, Any]:
    """Rank 1 is killed once; torchrun starts both ranks again."""
    trainer, seen, train, val = make_long(folder, sleeps=False)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def kill(trainer: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_hook(Once(1, 27 if first else -1, kill))
    trainer.fit(train, val, resume_from="auto")
    return {**describe(trainer, seen), "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}


def whole(folder: Path) -> dict[str, Any]:
    trainer, seen, train, val = make_long(folder, sleeps=False)
    trainer.fit(train, val)
    return describe(trainer, seen)


if __name__ == "__main__":
    for name in ("watch", "track", "change_size", "interrupt", "late_signal", "die", "whole"):
        setattr(shared, name, globals()[name])
    shared.main()
