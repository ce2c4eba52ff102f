"""A metric that a hook looks at: its value, or an error that lists the metrics there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.errors import TrainingError, listed, nearest

__all__ = ["Monitors", "check_is_there", "monitored"]


class Monitors:
    """A hook that fails where a metric is missing, and can say so before training."""

    def monitors(self, trainer: Any) -> tuple[str, list[str]]:
        """Return the event in which it looks at metrics, and which ones it needs there."""
        raise NotImplementedError


def monitored(metrics: Mapping[str, Any], name: str, who: str, trainer: Any = None) -> float:
    """Return a metric as a number; this waits for the device it is on.

    Args:
        metrics: what there is.
        name: the metric's name.
        who: who asks, for the error.
        trainer: the trainer, or the session of a bare loop.
    """
    check_is_there(metrics, name, who, trainer)
    value = metrics[name]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TrainingError(
            f"{who} looks at the metric '{name}', which is {value!r} and not a number."
        ) from None


def check_is_there(metrics: Mapping[str, Any], name: str, who: str, trainer: Any = None) -> None:
    """Raise an error that lists the metrics, and names the nearest, if this one is missing."""
    if name not in metrics:
        raise TrainingError(
            f"{who} looks at the metric '{name}', which is not there.{nearest(name, metrics)} "
            f"The metrics are: {listed(metrics)}.{_supply(name, trainer)}"
        )


def _supply(name: str, trainer: Any) -> str:
    """Say which call supplies a metric, where the loop has to make it."""
    if not hasattr(trainer, "validation"):
        return ""
    where, _, short = name.rpartition("/")
    if where in ("val", "eval"):
        return f" Supply it: `session.log('{short}', value)` within `with session.validation():`."
    return f" Supply it: `session.log('{short if where == 'train' else name}', value)`."
