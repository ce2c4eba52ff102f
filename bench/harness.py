"""Measure several candidates beside each other, and show what came out.

A machine gets faster and slower all the time. So every round runs all candidates, in a shuffled
order, and compares within the round: a ratio is the median of the rounds' ratios, its spread the
quartiles of these. One thread, no garbage collection inside a timed block, warm-up rounds first.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

__all__ = [
    "Candidate",
    "Rounds",
    "Row",
    "Spread",
    "block",
    "interleave",
    "interval_of_median",
    "table",
]

Candidate = Callable[[], float]
"""Runs one timed block and returns the seconds per unit of work; set-up is not in them."""


def block(*statements: str, loops: int, units: int = 1, **names: Any) -> Candidate:
    """Return a candidate that runs these statements `loops` times.

    Each is compiled on its own: the interpreter adapts code to the types it meets, and candidates
    that shared code would spoil each other's. The names are local variables in it.

    Args:
        statements: the body of the loop; several of them make the loop itself negligible.
        loops: how often the body runs.
        units: the units of work in one statement, such as the hooks that it calls.
        names: what the statements use.
    """
    body = "\n".join(f"        {statement}" for statement in statements)
    text = (
        f"def run({', '.join(['loops', *names])}):\n"
        f"    begin = clock()\n"
        f"    for _ in repeat(None, loops):\n"
        f"{body}\n"
        f"    return clock() - begin\n"
    )
    scope: dict[str, Any] = {}
    exec("from itertools import repeat\nfrom time import perf_counter as clock\n" + text, scope)
    run = scope["run"]
    values = tuple(names.values())
    work = loops * len(statements) * units
    return lambda: run(loops, *values) / work


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return where the median lies with a probability of 95 %, by a bootstrap."""
    draw = random.Random(0).choices
    medians = sorted(median(draw(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


@dataclass
class Rounds:
    """The seconds per unit of work, by candidate, one per round."""

    seconds: dict[str, list[float]]

    def __contains__(self, name: object) -> bool:
        return name in self.seconds

    def time(self, name: str) -> float:
        return median(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> Spread:
        return self._compare(name, baseline, lambda a, b: a / b)

    def excess(self, name: str, baseline: str) -> Spread:
        return self._compare(name, baseline, lambda a, b: a - b)

    def _compare(self, name: str, baseline: str, by: Callable[[float, float], float]) -> Spread:
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=True)
        return Spread.of([by(a, b) for a, b in pairs])


def interleave(
    candidates: Mapping[str, Candidate], *, rounds: int, warmup: int = 2, seed: int = 0
) -> Rounds:
    """Run every candidate once per round, in an order shuffled anew for each round."""
    shuffle = random.Random(seed).shuffle
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what is there by now stays: collecting between rounds becomes cheap
    try:
        for i in range(warmup + rounds):
            order = list(names)
            shuffle(order)
            for name in order:
                spent = _without_garbage_collection(candidates[name])
                if i >= warmup:
                    seconds[name].append(spent)
    finally:
        gc.unfreeze()
    return Rounds(seconds)


def _without_garbage_collection(candidate: Candidate) -> float:
    gc.collect()
    gc.disable()
    try:
        return candidate()
    finally:
        gc.enable()


@dataclass(frozen=True)
class Row:
    """One measure. Without a limit it is there to be looked at."""

    measure: str
    spread: Spread
    unit: str  # "×" for a ratio
    limit: float | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.limit is None else self.spread.median <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "value": self.spread.median,
            "quartiles": [self.spread.low, self.spread.high],
            "unit": self.unit,
            "limit": self.limit,
            "met": self.met,
            "peers": dict(self.peers),
            "note": self.note,
        }


_MET = {True: "yes", False: "NO", None: ""}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: a line each, and below it what it was compared with."""
    cells = [("measure", "value", "quartiles", "limit", "met")]
    cells += [
        (
            row.measure,
            f"{row.spread.median:.2f} {row.unit}",
            f"{row.spread.low:.2f}–{row.spread.high:.2f}",
            "" if row.limit is None else f"{row.limit:g} {row.unit}",
            _MET[row.met],
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    text = [_line(cells[0], widths), "  ".join("-" * width for width in widths)]
    for row, line in zip(rows, cells[1:], strict=True):
        text.append(_line(line, widths))
        if row.note:
            text.append(f"    {row.note}")
        if row.peers:
            text.append("    peers: " + ", ".join(f"{k} {v}" for k, v in row.peers.items()))
    return "\n".join(text)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.ljust(widths[i]) for i, cell in enumerate(cells))
    return "  ".join([first, *others]).rstrip()
