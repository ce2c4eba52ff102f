"""Choosing which checkpoints of a folder are no longer needed. Nothing here removes any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["KeepRules", "choose_kept"]


class _Saved(Protocol):
    @property
    def step(self) -> int | None: ...
    @property
    def metrics(self) -> dict[str, object]: ...
    @property
    def is_last(self) -> bool: ...
    @property
    def is_best(self) -> bool: ...
    @property
    def is_emergency(self) -> bool: ...


@dataclass(frozen=True)
class KeepRules:
    """Which checkpoints are kept; one that any rule keeps is kept.

    Attributes:
        last: The newest N.
        best: The K best by a metric.
        metric: The metric.
        mode: Whether a low or a high value is better.
        every: Those whose step is a multiple of M.
    """

    last: int = 0
    best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    every: int | None = None


def choose_kept(checkpoints: Sequence[_Saved], rules: KeepRules) -> list[list[str]]:
    """Return, for each checkpoint, why it is kept; an empty list means that it is not needed.

    The newest checkpoint, those that `last` and `best` name, and those that were saved after a
    crash are always kept. The latter do not count among the newest or the best.

    Args:
        checkpoints: All complete checkpoints of a folder, the oldest first.
        rules: What else is kept.
    """
    regular = [index for index, one in enumerate(checkpoints) if not one.is_emergency]
    newest = regular[-max(rules.last, 1) :]
    best = _rank(checkpoints, regular, rules)[: rules.best]
    reasons: list[list[str]] = []
    for index, one in enumerate(checkpoints):
        found = {
            "last": one.is_last,
            "best": one.is_best,
            "emergency": one.is_emergency,
            "newest": index in newest,
            f"best {rules.metric}": index in best,
            f"every {rules.every} steps": bool(rules.every)
            and not one.is_emergency
            and one.step is not None
            and one.step % (rules.every or 1) == 0,
        }
        reasons.append([reason for reason, applies in found.items() if applies])
    return reasons


def _rank(checkpoints: Sequence[_Saved], indices: Sequence[int], rules: KeepRules) -> list[int]:
    """Return the checkpoints that have a finite value of the metric, the best first."""
    values: dict[int, float] = {}
    for index in indices:
        value = checkpoints[index].metrics.get(rules.metric or "")
        if isinstance(value, (int, float)) and math.isfinite(value):
            values[index] = value if rules.mode == "min" else -value
    return sorted(values, key=lambda index: (values[index], index))
