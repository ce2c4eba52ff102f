"""Metrics in hooks: looking one up, with an error that lists the others, and showing texts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hookline.arguments import show_value
from hookline.context import to_float
from hookline.errors import TrainingError, listed, nearest
from hookline.printable import printable, printable_message
from hookline.text_tables import join_some

log = logging.getLogger("hookline")


class RequiresMetrics:
    """A hook that fails if a metric is missing. This allows checking before training."""

    def required_metrics(self, trainer: Any) -> tuple[str, list[str]]:
        """Return the event in which the hook reads metrics, and the names of those it needs."""
        raise NotImplementedError


def metric_value(metrics: Mapping[str, Any], name: str, hook: str, trainer: Any = None) -> float:
    """Return a metric as a number; this waits for the device. `hook` is named in errors."""
    require_metric(metrics, name, hook, trainer)
    value = metrics[name]
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        large = isinstance(error, OverflowError)
        wrong = "above the largest float" if large else "not a number"
        raise TrainingError(
            f"{hook} monitors the metric '{name}', which is {show_value(value)}, {wrong}."
        ) from None


def require_metric(metrics: Mapping[str, Any], name: str, hook: str, trainer: Any = None) -> None:
    """Raise an error that lists the metrics and suggests the nearest if this one is missing."""
    if name not in metrics:
        raise TrainingError(missing_text(metrics, name, hook, trainer))


def missing_text(metrics: Mapping[str, Any], name: str, hook: str, trainer: Any = None) -> str:
    """Return sentences that say that a metric is missing, which there are, and what to do."""
    return (
        f"{hook} monitors the metric '{name}', which is missing.{nearest(name, metrics)} "
        f"The metrics are: {listed(metrics)}.{_provision_hint(name, trainer)}"
    )


def _provision_hint(name: str, trainer: Any) -> str:
    """Return a sentence about the call that provides a metric, if it is up to the user's loop."""
    if not hasattr(trainer, "validation"):
        return ""
    where, _, short = name.rpartition("/")
    if where in ("val", "eval"):
        return f" Log it with `session.log('{short}', value)` within `with session.validation():`."
    return f" Log it with `session.log('{short if where == 'train' else name}', value)`."


def log_or_print(text: str) -> None:
    """Log a text that the user asked for; print it if logging would not show it."""
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", text)
    else:
        print(printable_message(text), flush=True)


def number_text(value: Any) -> str:
    """Return a number with few digits; a value on a device is read, other values use `str`."""
    try:
        number = to_float(value)
    except (TypeError, ValueError, RuntimeError):  # not a number, or a tensor with many elements
        return printable(value)
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.3e}"


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return names and numbers: `train/loss 0.1234, val/loss 0.2345`."""
    texts = (f"{name} {number_text(value)}" for name, value in metrics.items())
    return join_some(texts) or "no metrics"
