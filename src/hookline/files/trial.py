"""A training, tried out: one batch through model, loss and backward, and nothing is changed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from hookline.errors import HooklineError, TrainingError
from hookline.files.building import raised_in
from hookline.files.loading import Training
from hookline.files.trust import importable
from hookline.losses import structure
from hookline.trainer import Trainer
from hookline.training import evaluation

__all__ = ["try_training"]


def try_training(training: Training) -> dict[str, Any]:
    """Draw a batch of each kind of data, compute its loss, run backward; return what was seen.

    No optimizer steps and no run is recorded.

    Raises:
        HooklineError: something does not work; the message says with which batch.
    """
    trainer = training.trainer
    with importable(training.folder):
        with _trying("the data"):
            trainer._take_data(training.loaders, training.val_loaders)
        trainer._watch.watch(calls=False, backward=False)  # hooks are bound, and not called
        try:
            train = _train_batch(trainer)
            val = _val_batch(trainer) if trainer.validates else None
        finally:
            trainer._hooks_changed()
    return {**_facts(training), "train": train, "val": val}


def _train_batch(trainer: Trainer) -> dict[str, Any]:
    batch = _first(trainer._stream(), "data.train")
    with _trying(f"a batch of data.train, {structure(batch)}"):
        trainer.model.train()
        loss = _loss(trainer, batch)
        if not loss.requires_grad:
            raise TrainingError("The loss has no gradient: nothing in it is a trained parameter.")
        trainer._strategy.backward(loss)
    parameters = [p for one in trainer.optimizers for g in one.param_groups for p in g["params"]]
    reached = sum(parameter.grad is not None for parameter in parameters)
    trainer.model.zero_grad(set_to_none=True)
    return {
        "batches": trainer._stream().length(),
        "batch": structure(batch),
        "loss": float(loss.detach()),
        "gradients": reached,
        "parameters": len(parameters),
    }


def _val_batch(trainer: Trainer) -> dict[str, Any]:
    stream: Any = trainer._val
    batch = _first(stream, "data.val")
    with (
        _trying(f"a batch of data.val, {structure(batch)}"),
        evaluation(trainer.model, trainer.device),
    ):
        loss = _loss(trainer, batch)
    return {"batches": stream.length(), "batch": structure(batch), "loss": float(loss.detach())}


def _first(stream: Any, what: str) -> Any:
    with _trying(what):
        for drawn in stream.epoch():
            return drawn.batch
        raise TrainingError("It gave no batch.")


def _loss(trainer: Trainer, batch: Any) -> torch.Tensor:
    strategy = trainer._strategy
    moved = strategy.move(batch) if strategy.moves else batch
    with strategy.autocast():
        loss, _ = trainer._loss_of(trainer.model, moved)
    return loss


@contextmanager
def _trying(what: str) -> Generator[None]:
    try:
        yield
    except HooklineError as error:
        raise TrainingError(f"With {what}: {error}") from error
    except Exception as error:  # whatever the user's own code raises
        raise TrainingError(
            f"With {what}: {type(error).__name__}: {error}{raised_in(error)}"
        ) from error


def _facts(training: Training) -> dict[str, Any]:
    trainer = training.trainer
    config = trainer.config
    return {
        "config": training.source,
        "config_hash": training.config_hash,
        "model": type(trainer.model).__qualname__,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "optimizers": [type(one).__name__ for one in trainer.optimizers],
        "schedulers": [type(one).__name__ for one in trainer.schedulers],
        "device": str(trainer.device),
        "precision": config.precision,
        "epochs": trainer._last_epoch(),
        "steps": config.max_steps,
        "seed": config.seed,
        "runs": None if config.runs is None else str(config.runs),
        "hooks": [
            {"name": info.name, "kind": info.kind, "status": info.status}
            for info in trainer.hooks.describe()
        ],
    }
