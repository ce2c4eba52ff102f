"""Batches that keep time, so that every loop is timed in the same way: hookline's and the peers'.

The clock is read when the loop asks for the first batch after the warm-up, and when it asks for
the first after the timed ones. A loop that fetches ahead does so both times: between the two lie
exactly the given number of steps, and nothing of a trainer's set-up or end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from time import perf_counter
from typing import Any

import torch

__all__ = ["Batches"]

AFTER = 5  # batches after the timed ones, so that no loop ends within these


class Batches:
    """One batch, again and again.

    Args:
        steps: how many steps are timed.
        warmup: how many steps run before these.
        names: make the batch a dictionary with these names, for loops that want one.
    """

    def __init__(self, steps: int, warmup: int, names: tuple[str, str] | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, 4, 8, generator=generator)
        self.batch: Any = (x, y) if names is None else dict(zip(names, (x, y), strict=True))
        self.steps = steps
        self.warmup = warmup
        self.times: list[float] = []

    def __len__(self) -> int:
        return self.warmup + self.steps + AFTER

    def __iter__(self) -> Iterator[Any]:
        self.times = []
        # Between the two readings no Python code of ours runs: iterating costs 20 ns.
        return chain(
            repeat(self.batch, self.warmup),
            self._read_clock(),
            repeat(self.batch, self.steps - 1),
            self._read_clock(),
            repeat(self.batch, AFTER - 1),
        )

    def _read_clock(self) -> Iterator[Any]:
        self.times.append(perf_counter())
        yield self.batch

    @property
    def seconds_per_step(self) -> float:
        begin, end = self.times
        return (end - begin) / self.steps
