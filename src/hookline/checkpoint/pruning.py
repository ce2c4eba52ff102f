"""Choosing which checkpoints of a folder are no longer needed. Nothing here removes any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hookline.checkpoint.keep_rules import KeepRules

__all__ = ["choose_kept"]


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
    @property
    def is_weights_only(self) -> bool: ...


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint that was not saved after a crash, as the rules see it."""

    index: int
    step: int | None
    score: float | None


def choose_kept(
    checkpoints: Sequence[_Saved], rules: KeepRules, metric: str | None = None
) -> list[list[str]]:
    """Return, for each checkpoint, why it is kept; an empty list means that it is not needed.

    The newest checkpoint, the newest that a run can resume from, those that `last` and `best` name,
    and those that were saved after a crash are always kept. The last of these do not count among
    the newest or the best, and those without a finite value of the metric not among the best.

    Args:
        checkpoints: All complete checkpoints of a folder, the oldest first.
        rules: What else is kept.
        metric: What the best are ranked by.
    """
    regular = [
        _Candidate(index, one.step, _read_score(one, metric))
        for index, one in enumerate(checkpoints)
        if not one.is_emergency
    ]
    full = [i for i, one in enumerate(regular) if not checkpoints[one.index].is_weights_only]
    kept = {
        "newest": rules.newest(regular) | {len(regular) - 1, *full[-1:]},
        f"best {metric}": {i for i in rules.best_ranked(regular) if regular[i].score is not None},
        f"every {rules.every} steps": rules.first_of_intervals(regular),
    }
    by_rule = {
        reason: {one.index for i, one in enumerate(regular) if i in chosen}
        for reason, chosen in kept.items()
    }
    reasons: list[list[str]] = []
    for index, one in enumerate(checkpoints):
        found = {"last": one.is_last, "best": one.is_best, "emergency": one.is_emergency}
        found |= {reason: index in chosen for reason, chosen in by_rule.items()}
        reasons.append([reason for reason, applies in found.items() if applies])
    return reasons


def _read_score(checkpoint: _Saved, metric: str | None) -> float | None:
    """Return the value of the metric; None if it is not finite."""
    value = checkpoint.metrics.get(metric or "")
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
