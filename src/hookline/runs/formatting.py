"""Runs as tables for people.

Names and values may come from anybody: control characters are escaped, long lists are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hookline.printable import printable
from hookline.runs.checkpoint_reader import SavedCheckpoint
from hookline.runs.environment import describe_commit
from hookline.runs.metric_values import MetricSummary
from hookline.text_tables import format_table, join_lines, join_some

_MAX_ROWS = 40  # of metrics, and of checkpoints
_MAX_DAMAGE = 20  # lines

Fields = Mapping[str, Any]


def format_run_line(overview: Fields) -> str:
    """Return a short line about a run."""
    steps = "no steps" if overview["steps"] is None else f"{overview['steps']} steps"
    line = f"<run {overview['id']}: {overview['status']}, {steps}, {overview['path']}>"
    return printable(line, 500)


def format_run(
    overview: Fields,
    manifest: Fields,
    results: Mapping[str, MetricSummary],
    checkpoints: Sequence[SavedCheckpoint],
    damage: Sequence[str],
) -> str:
    """Return a run's fields, metrics, checkpoints and damage as text."""
    fields = _main_fields(overview, manifest)
    tables = [
        (_METRIC_HEADERS, [_metric_row(*item) for item in results.items()]),
        (_CHECKPOINT_HEADERS, [_checkpoint_row(checkpoint) for checkpoint in checkpoints]),
    ]
    blocks = [format_table(fields[0], fields[1:])]
    blocks += [format_table(*table, limit=_MAX_ROWS) for table in tables if table[1]]
    lines = join_lines([f"damaged: {line}" for line in damage], _MAX_DAMAGE)
    return "\n\n".join([*blocks, lines] if lines else blocks)


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    total = round(seconds)
    for size, unit, smaller_size, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if total >= size:
            return f"{total // size} {unit} {total % size // smaller_size:02d} {smaller_unit}"
    return f"{total // 60} min {total % 60:02d} s"


def format_time(text: Any) -> str:
    """Return a time of a manifest, to the second."""
    return str(text)[:19].replace("T", " ") if text else "?"


def format_number(value: Any) -> str:
    """Return a number with six significant digits; other values as text."""
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return str(value)


_METRIC_HEADERS = ("metric", "last", "best", "at step", "values")
_CHECKPOINT_HEADERS = ("checkpoint", "step", "epoch", "", "metrics")


def _main_fields(overview: Fields, manifest: Fields) -> list[tuple[str, str]]:
    git = overview["git"]
    changes = ", with uncommitted changes" if git.get("dirty") else ""
    branch = f" on {git['branch']}" if git.get("branch") else ""
    versions = manifest.get("versions", {}).items()
    parent = manifest.get("parent")
    origin = parent and f"run {parent.get('run_id')} at step {parent.get('step')}"
    fields = [
        ("run", overview["id"]),
        ("name", manifest.get("name")),
        ("tags", join_some(manifest.get("tags") or ())),
        ("folder", overview["path"]),
        ("status", overview["status"]),
        ("forked from", origin),
        ("last error", _first_line(overview["last_error"])),
        ("started", f"{format_time(overview['started'])} UTC"),
        ("trained", _describe_training(overview)),
        ("git", describe_commit(git, 12) + branch + changes if git else None),
        ("config", str(overview["config_hash"] or "")[:12]),
        ("seed", manifest.get("seed")),
        *_training_fields(manifest.get("training")),
        ("hooks", _list_hooks(manifest.get("hooks") or ())),
        ("versions", join_some(f"{name} {version}" for name, version in versions if version)),
    ]
    return [(name, str(value)) for name, value in fields if value not in (None, "")]


def _training_fields(training: Any) -> list[tuple[str, str]]:
    """Return lines about the model, optimizers, schedulers, loaders and hyperparameters."""
    fields: list[tuple[str, str]] = []
    if training is None:
        return fields
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # of a damaged manifest
        for model in (training["model"], *training.get("models", ())):
            fields.append(("model", f"{_short(model)}, {model['parameters'] or 0:,} parameters"))
        for optimizer in training["optimizers"]:
            rates = join_some(format_number(group.get("lr")) for group in optimizer["groups"])
            fields.append(("optimizer", f"{_short(optimizer)}, lr {rates}"))
        hparams = training.get("hparams", {}).items()
        fields.append(("hparams", join_some(f"{k}={format_number(v)}" for k, v in hparams)))
    return fields


def _short(described: Fields) -> str:
    return str(described["class"]).rpartition(".")[2]


def _first_line(error: Any) -> str:
    """Return the first line of an error; that of Ctrl-C has no message."""
    first, *more = str(error or "").strip().splitlines() or [""]
    return first.removesuffix(":") + (" …" if more else "")


def _describe_training(overview: Fields) -> str:
    attempts = overview["attempts"]
    duration = format_duration(overview["seconds"])
    steps = "" if overview["steps"] is None else f", {overview['steps']} steps"
    return duration + steps + (f", in {attempts} attempts" if attempts > 1 else "")


def _list_hooks(hooks: Sequence[Any]) -> str:
    return join_some(
        str(hook.get("name")) + ("" if hook.get("enabled", True) else " (disabled)")
        for hook in hooks
        if isinstance(hook, dict)
    )


def _metric_row(name: str, summary: MetricSummary) -> tuple[str, ...]:
    numbers = (summary.last, summary.best, summary.best_step, summary.count)
    return (name, *map(format_number, numbers))


def _checkpoint_row(checkpoint: SavedCheckpoint) -> tuple[str, ...]:
    pointers = ["last"] * checkpoint.is_last + ["best"] * checkpoint.is_best
    metrics = [f"{name} {format_number(value)}" for name, value in checkpoint.metrics.items()]
    step, epoch = format_number(checkpoint.step), format_number(checkpoint.epoch)
    return checkpoint.path.name, step, epoch, " ".join(pointers), join_some(metrics)
