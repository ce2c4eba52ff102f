"""How hooks that write for people show numbers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

__all__ = ["duration_text", "metrics_text", "number_text"]


def number_text(value: Any) -> str:
    """Return a number in a few digits; what is none, as it is. A number on a device is read."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # no number; a tensor with several elements
        return str(value)
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.3e}"


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return names and numbers: `train/loss 0.1234, val/loss 0.2345`."""
    parts = [f"{name} {number_text(value)}" for name, value in metrics.items()]
    return ", ".join(parts) or "no metrics"


def duration_text(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds: `1:02:03`."""
    return str(timedelta(seconds=int(seconds)))
