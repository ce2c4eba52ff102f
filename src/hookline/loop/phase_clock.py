"""A clock for consecutive phases of a loop, such as forward and backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from hookline.tensors.timing import Mark, elapsed_ms, is_over, mark, timed_device

__all__ = ["PhaseClock"]


class PhaseClock:
    """Times consecutive phases: with events of the device if it has them, else by wall clock.

    A wall clock would measure how long it takes to launch the work of a device.

    Attributes:
        weight: how often each phase counts from now on.
        is_device: whether the device itself is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.weight = 1
        self._device = timed_device(device)
        self.is_device = self._device is not None
        self._last = self.now()
        self._open: deque[tuple[Any, Mark, Mark, int]] = deque()
        self._sums: dict[Any, tuple[float, int]] = {}

    def now(self) -> Mark:
        """Return a mark of this point in time."""
        return mark(self._device)

    def start(self, begin: Mark = None) -> None:
        """Begin the first phase, now or at a mark."""
        self._last = self.now() if begin is None else begin

    def lap(self, phase: Hashable, end: Mark = None) -> None:
        """End a phase, now or at a mark, and begin the next one."""
        now = self.now() if end is None else end
        if self._device is None:
            self.add(phase, elapsed_ms(self._last, now))
        else:
            self._open.append((phase, self._last, now, self.weight))
        self._last = now

    def add(self, phase: Hashable, milliseconds: float, weight: int | None = None) -> None:
        """Add the duration of a phase."""
        weight = self.weight if weight is None else weight
        total, count = self._sums.get(phase, (0.0, 0))
        self._sums[phase] = (total + weight * milliseconds, count + weight)

    def take(self) -> dict[Any, tuple[float, int]]:
        """Return milliseconds and number of each phase, and reset.

        Phases that the device has not finished count for the next report.
        """
        while self._open and is_over(self._open[0][2]):
            phase, begin, end, weight = self._open.popleft()
            self.add(phase, elapsed_ms(begin, end), weight)
        sums, self._sums = self._sums, {}
        return sums
