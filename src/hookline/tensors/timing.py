"""Measuring how long modules take, without waiting for the device.

On the CPU the clock is read. On other devices an event is recorded in the stream, and its time is
read in the report.
"""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import Any, TypeAlias

import torch

Timestamp: TypeAlias = Any
"""A point in time: seconds of `perf_counter`, or a recorded event of a device."""

_MAX_SPANS = 4096  # kept before the finished ones are summed up


def record_time(device: torch.device | None) -> Timestamp:
    """Record the current point in the device's stream; on the CPU, the current time."""
    if device is None or device.type == "cpu":
        return perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def timed_device(device: torch.device) -> torch.device | None:
    """Return the device if it can time its own work; None if the wall clock has to be used."""
    if device.type == "cpu":
        return None
    try:
        record_time(device)
    except (RuntimeError, NotImplementedError, TypeError):  # it has no timed events
        return None
    return device


def elapsed_ms(begin: Timestamp, end: Timestamp) -> float:
    """Return the milliseconds between two times; this waits until the device has reached both."""
    if isinstance(begin, float):
        return float(end - begin) * 1e3
    end.synchronize()
    return float(begin.elapsed_time(end))


def is_over(point: Timestamp) -> bool:
    """Return whether the device has reached this time."""
    return isinstance(point, float) or bool(point.query())


class Times:
    """The total time of each module over all its calls. Threads may add at the same time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, Timestamp, Timestamp]] = deque()
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, begin: Timestamp, end: Timestamp) -> None:
        """Add the time between two points, which the device may not have reached."""
        self._spans.append((name, begin, end))
        if len(self._spans) > _MAX_SPANS:
            self._sum_up(wait=False)

    def take(self) -> dict[str, float]:
        """Return milliseconds by name, and reset. This waits for the device."""
        self._sum_up(wait=True)
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums

    def _sum_up(self, *, wait: bool) -> None:
        with self._lock:
            for _ in range(len(self._spans)):  # other threads may add meanwhile
                name, begin, end = self._spans.popleft()
                if wait or is_over(end):
                    self._sums[name] = self._sums.get(name, 0.0) + elapsed_ms(begin, end)
                else:
                    self._spans.append((name, begin, end))
