"""Dry run: one batch through model, loss and backward, without an optimizer step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from hookline.config_files.building import format_origin
from hookline.config_files.loading import Training
from hookline.config_files.tree import FileError, shorten
from hookline.config_files.trust import importable
from hookline.errors import HooklineError, TrainingError
from hookline.hooks.lint.finding import Finding
from hookline.hooks.lint.lint_hook import Lint
from hookline.loop.evaluation import evaluation
from hookline.printable import message_lines
from hookline.tensors.nested import describe_structure
from hookline.trainer.checks import MissingMetricError, check_metrics
from hookline.trainer.trainer import Trainer

_MAX_MESSAGE = 4_000


def dry_run(training: Training) -> dict[str, Any]:
    """Run one training and one validation batch; return a description of the training.

    The training batch also runs backward, and is looked at by the passive checks of `Lint`. No
    optimizer steps, and no run is written.
    """
    trainer = training.trainer
    with importable(training.folder):
        with _errors_name("the data"):
            trainer.set_data(training.loaders, training.val_loaders)
        with _linted(trainer) as findings:
            train = _train_batch(trainer)
        val = _val_batch(trainer) if trainer.validates else None
        _check_validation(training)
    shown = [finding.as_dict() for finding in findings]
    return {**_describe(training), "train": train, "val": val, "findings": shown}


@contextmanager
def _linted(trainer: Trainer) -> Generator[list[Finding]]:
    """Yield the list of what passive checks find; those of a `Lint` of the config, if it has one.

    Checks that look at the optimizer's step are not called: there is none.
    """
    hooks = [hook for _, hook, _ in trainer.hooks.of_kind("loop") if isinstance(hook, Lint)]
    options: dict[str, Any] = {"only": hooks[0].only, "ignore": hooks[0].ignore} if hooks else {}
    lint = Lint(**options, active=False)
    lint.on_train_start(trainer, trainer.model, trainer.optimizers)
    try:
        yield lint.findings
        lint.on_step_end(1)
    finally:
        lint.on_train_end(trainer)


def _train_batch(trainer: Trainer) -> dict[str, Any]:
    stream: Any = trainer.train_data
    batch = _first_batch(stream, "data.train")
    with _errors_name(f"a batch of data.train, {describe_structure(batch)}"):
        seen = trainer.dry_run(batch)
    del seen["metrics"]
    return {"batches": stream.length(), "batch": describe_structure(batch), **seen}


def _val_batch(trainer: Trainer) -> dict[str, Any]:
    stream: Any = trainer.val_data
    batch = _first_batch(stream, "data.val")
    with (
        _errors_name(f"a batch of data.val, {describe_structure(batch)}"),
        evaluation(trainer.model, trainer.device),
    ):
        loss, _ = trainer.compute_loss(batch)
    return {
        "batches": stream.length(),
        "batch": describe_structure(batch),
        "loss": float(loss.detach()),
    }


def _first_batch(stream: Any, key: str) -> Any:
    with _errors_name(key):
        for batch, *_ in stream.epoch():
            return batch
        raise TrainingError("It has no batches.")


def _check_validation(training: Training) -> None:
    """Raise if something needs a metric of the validation, and there is none."""
    try:
        check_metrics(training.trainer)
    except MissingMetricError as error:
        key = training.hook_keys.get(error.hook)
        if key is None or training.tree is None:
            raise
        raise FileError([training.tree.problem(key, str(error))]) from error


@contextmanager
def _errors_name(subject: str) -> Generator[None]:
    """Put the subject before the message of any error."""
    try:
        yield
    except HooklineError as error:
        first, *others = str(error).split("\n")
        raise TrainingError(message_lines(f"With {subject}: {first}", *others)) from error
    except Exception as error:  # whatever the user's code raises
        reason = f"{type(error).__name__}: {error}"
        shown = shorten(f"With {subject}: {reason}", _MAX_MESSAGE)
        raise TrainingError(shown + format_origin(error)) from error


def _describe(training: Training) -> dict[str, Any]:
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
