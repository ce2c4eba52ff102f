"""The rules about which checkpoints are kept: the newest, the best, and some for ever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["KeepRules", "Mode", "Scored", "rank"]

Mode = Literal["min", "max"]
"""Which score is better: the lower or the higher one."""


class Scored(Protocol):
    """A checkpoint as the rules see it."""

    @property
    def step(self) -> int | None:
        """The number of completed steps; None if unknown."""

    @property
    def score(self) -> float | None:
        """What it is ranked by; None if unknown."""


@dataclass(frozen=True)
class KeepRules:
    """Which checkpoints are kept; one that any rule keeps is kept.

    Attributes:
        last: The newest N; -1 for all.
        best: The K with the best scores; -1 for all. Those without a finite score come last.
        mode: Which score is better.
        every: Of every M steps, the first checkpoint, for ever.
    """

    last: int = 0
    best: int = 0
    mode: Mode = "min"
    every: int | None = None

    def newest(self, checkpoints: Sequence[Scored]) -> set[int]:
        """Return the indices of the newest; the checkpoints are sorted, the oldest first."""
        count = len(checkpoints)
        return set(range(0 if self.last == -1 else max(count - self.last, 0), count))

    def best_ranked(self, checkpoints: Sequence[Scored]) -> set[int]:
        """Return the indices of the best."""
        ranked = rank(checkpoints, self.mode)
        return set(ranked if self.best == -1 else ranked[: self.best])

    def first_of_intervals(self, checkpoints: Sequence[Scored]) -> set[int]:
        """Return the indices of those that are kept for ever."""
        first: dict[int, int] = {}  # by the number of complete intervals
        for index, one in enumerate(checkpoints):
            if self.every is not None and one.step is not None:
                first.setdefault(one.step // self.every, index)
        return {index for interval, index in first.items() if interval}

    def choose(self, checkpoints: Sequence[Scored]) -> set[int]:
        """Return the indices of all that are kept."""
        rules = (self.newest, self.best_ranked, self.first_of_intervals)
        return set().union(*(rule(checkpoints) for rule in rules))


def rank(checkpoints: Sequence[Scored], mode: Mode) -> list[int]:
    """Return indices, the best first; of equal scores the earlier, without a finite score last."""

    def key(index: int) -> tuple[bool, float]:
        score = checkpoints[index].score
        if score is None or not math.isfinite(score):
            return True, 0.0
        return False, score if mode == "min" else -score

    return sorted(range(len(checkpoints)), key=key)
