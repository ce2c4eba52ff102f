"""A metric that a hook looks at: its value, or an error that lists the metrics there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.errors import TrainingError, listed, nearest

__all__ = ["monitored"]


def monitored(metrics: Mapping[str, Any], name: str, who: str) -> float:
    """Return a metric as a number; this waits for the device it is on.

    Args:
        metrics: what there is.
        name: the metric's name.
        who: who asks, for the error.
    """
    if name not in metrics:
        raise TrainingError(
            f"{who} looks at the metric '{name}', which is not there.{nearest(name, metrics)} "
            f"The metrics are: {listed(metrics)}."
        )
    value = metrics[name]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TrainingError(
            f"{who} looks at the metric '{name}', which is {value!r} and not a number."
        ) from None
