"""A training, tried out: one batch through model, loss and backward, and nothing is changed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from hookline.builtin import BuiltIn
from hookline.config import HookRegistry
from hookline.config_files.building import raised_in
from hookline.config_files.loading import Training
from hookline.config_files.trust import importable
from hookline.context import Metrics
from hookline.errors import HooklineError, TrainingError, nearest
from hookline.hooks.metric_lookup import Monitors, check_is_there
from hookline.loop.evaluation import evaluation
from hookline.tensors.nested import describe_structure
from hookline.trainer.trainer import Trainer

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
            trainer.set_data(training.loaders, training.val_loaders)
        train = _train_batch(trainer)
        val = _val_batch(trainer) if trainer.validates else None
        train_names, val_names = train.pop("names"), [] if val is None else val.pop("names")
        _check_monitors(trainer, train_names, val_names)
    return {**_facts(training), "train": train, "val": val}


def _train_batch(trainer: Trainer) -> dict[str, Any]:
    stream: Any = trainer.train_data
    batch = _first(stream, "data.train")
    with _trying(f"a batch of data.train, {describe_structure(batch)}"):
        seen = trainer.dry_run(batch)
    names = [f"train/{name}" for name in seen.pop("metrics")]
    return {
        "batches": stream.length(),
        "batch": describe_structure(batch),
        **seen,
        "names": names,
    }


def _val_batch(trainer: Trainer) -> dict[str, Any]:
    stream: Any = trainer.val_data
    batch = _first(stream, "data.val")
    with (
        _trying(f"a batch of data.val, {describe_structure(batch)}"),
        evaluation(trainer.model, trainer.device),
    ):
        loss, extra = trainer.compute_loss(batch)
    return {
        "batches": stream.length(),
        "batch": describe_structure(batch),
        "loss": float(loss.detach()),
        "names": [f"val/{name}" for name in ("loss", *extra)],
    }


def _first(stream: Any, what: str) -> Any:
    with _trying(what):
        for drawn in stream.epoch():
            return drawn.batch
        raise TrainingError("It gave no batch.")


def _check_monitors(trainer: Trainer, train: list[str], val: list[str]) -> None:
    """Compare the metrics that hooks look at with those of the batches, where these are all."""
    streams = (trainer.train_data, trainer.val_data)
    if any(one is not None and len(one.names) > 1 for one in streams) or _others_add(trainer.hooks):
        return
    own = trainer.step_fn is not None
    there = {"on_validation_end": val, "on_epoch_end": [*train, *val]}
    for name, hook, active in trainer.hooks.of_kind("loop"):
        if not active or not isinstance(hook, Monitors):
            continue
        event, looks_at = hook.monitors(trainer)
        with _trying(f"the hook '{name}'"):
            for metric in looks_at if there[event] else ():  # none: that event does not come
                if own and not nearest(metric, there[event]):
                    continue  # other batches may give it
                check_is_there(Metrics.fromkeys(there[event]), metric, type(hook).__name__)


def _others_add(hooks: HookRegistry) -> bool:
    """Whether hooks that are not Hookline's own get the metrics, and may add to them."""
    asking = [
        one.rpartition(" (")[0]
        for event in ("on_validation_end", "on_epoch_end")
        for one in hooks.wanted(event, optional=True).get("metrics", [])
    ]
    return not all(isinstance(hooks.get_hook(name), BuiltIn) for name in asking)


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
        "epochs": trainer.max_epochs,
        "steps": config.max_steps,
        "seed": config.seed,
        "runs": None if config.runs is None else str(config.runs),
        "hooks": [
            {"name": info.name, "kind": info.kind, "status": info.status}
            for info in trainer.hooks.describe()
        ],
    }
