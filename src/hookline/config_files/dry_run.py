"""Dry run: one batch through model, loss and backward, without an optimizer step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from hookline.config_files.building import format_origin
from hookline.config_files.loading import Training
from hookline.config_files.tree import FileError, Key, shorten
from hookline.config_files.trust import importable
from hookline.context import Metrics
from hookline.errors import HooklineError, TrainingError, nearest
from hookline.hooks.lint.finding import Finding
from hookline.hooks.lint.lint_hook import Lint
from hookline.hooks.metric_lookup import RequiresMetrics, require_metric
from hookline.loop.evaluation import evaluation
from hookline.printable import message_lines
from hookline.tensors.nested import describe_structure
from hookline.trainer.checks import MissingMetricError, check_metrics, users_add_metrics
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
        train_names, val_names = train.pop("names"), [] if val is None else val.pop("names")
        _check_monitors(training, train_names, val_names)
        _check_length(training)
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
    names = [f"train/{name}" for name in seen.pop("metrics")]
    length = stream.length()
    return {"batches": length, "batch": describe_structure(batch), **seen, "names": names}


def _val_batch(trainer: Trainer) -> dict[str, Any]:
    stream: Any = trainer.val_data
    batch = _first_batch(stream, "data.val")
    with (
        _errors_name(f"a batch of data.val, {describe_structure(batch)}"),
        evaluation(trainer.model, trainer.device),
    ):
        loss, extra = trainer.compute_loss(batch)
    return {
        "batches": stream.length(),
        "batch": describe_structure(batch),
        "loss": float(loss.detach()),
        "names": [f"val/{name}" for name in ("loss", *extra)],
    }


def _first_batch(stream: Any, key: str) -> Any:
    with _errors_name(key):
        for batch, *_ in stream.epoch():
            return batch
        raise TrainingError("It has no batches.")


def _check_length(training: Training) -> None:
    """Raise if the settings say that nothing is trained."""
    config = training.trainer.config
    for name in ("max_steps", "max_epochs"):
        if getattr(config, name) == 0:
            text = "It is 0, so nothing would be trained. Expected 1 or more, or null for no limit."
            raise _error_at(training, ("trainer", name), f"trainer.{name}", text)


def _error_at(training: Training, key: Key | None, subject: str, text: str) -> HooklineError:
    """Return the error for a key of the config file; without a file, for its subject."""
    if training.tree is None or key is None:
        return TrainingError(f"With {subject}: {text}")
    return FileError([training.tree.problem(key, text)])


def _check_validation(training: Training) -> None:
    """Raise if something needs a metric of the validation, and there is none."""
    try:
        check_metrics(training.trainer)
    except MissingMetricError as error:
        key = training.hook_keys.get(error.hook)
        if key is None:
            raise
        raise _error_at(training, key, "", str(error)) from error


def _check_monitors(training: Training, train: list[str], val: list[str]) -> None:
    """Raise if a hook monitors a metric that the batches did not produce.

    Nothing is checked if other metrics can be added: by several loaders or by a user's hooks.
    """
    trainer = training.trainer
    streams = [one for one in (trainer.train_data, trainer.val_data) if one is not None]
    if any(len(one.names) > 1 for one in streams) or users_add_metrics(trainer.hooks):
        return
    metrics = {"on_validation_end": val, "on_epoch_end": [*train, *val]}
    for name, hook, active in trainer.hooks.of_kind("loop"):
        if not active or not isinstance(hook, RequiresMetrics):
            continue
        event, monitored = hook.required_metrics(trainer)
        for metric in monitored if metrics[event] else ():  # empty: the event does not occur
            if trainer.step_fn is not None and not nearest(metric, metrics[event]):
                continue  # the step function may return it for other batches
            try:
                require_metric(Metrics.fromkeys(metrics[event]), metric, type(hook).__name__)
            except HooklineError as error:
                key = training.hook_keys.get(name)
                raise _error_at(training, key, f"the hook '{name}'", str(error)) from error


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
