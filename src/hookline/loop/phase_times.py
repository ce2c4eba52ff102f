"""Where the time of a training loop goes: data, forward, backward, optimizer, hooks and the rest.

Batches that take long are all timed. Of short ones, some are, at random intervals, so that reading
clocks takes about 0.1 % of the time; they count for the others, but all phases together never for
more than the time that has passed. The time of hooks is known from their own accounting, and is not
part of the phase in which they are called.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from hookline.tensors.timing import Timestamp, elapsed_ms, is_over, record_time, timed_device

PHASES = (
    *("data", "forward", "backward", "optimizer"),
    *("hooks", "validation", "checkpoints", "other"),
)

_ON_DEVICE = ("forward", "backward", "optimizer")  # timed by the device, if it can
_OF_CLOCKS = 0.001  # the fraction of the time that clocks may take
_CPU_SECONDS, _DEVICE_SECONDS = 7e-6, 40e-6  # what timing a batch takes

# In which phase an event is fired; other events are fired between phases.
_EVENTS_OF_PHASE = {
    "forward": "on_train_batch_start on_before_forward on_after_forward on_before_backward",
    "backward": "on_after_backward",
    "optimizer": "on_gradients_ready update on_gradient_clip on_before_optimizer_step "
    "on_after_optimizer_step on_step_skipped",
    "validation": "on_validation_start on_validation_batch_start on_validation_batch_end "
    "on_validation_end",
    "checkpoints": "on_checkpoint_save",
}
_PHASE_OF_EVENT = {e: phase for phase, text in _EVENTS_OF_PHASE.items() for e in text.split()}


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
        self._open: deque[tuple[Any, Timestamp, Timestamp, int]] = deque()
        self._sums: dict[Any, tuple[float, int]] = {}

    def now(self) -> Timestamp:
        """Return the current time, of the device if it has a clock."""
        return record_time(self._device)

    def start(self, begin: Timestamp = None) -> None:
        """Begin the first phase, now or at this time."""
        self._last = self.now() if begin is None else begin

    def lap(self, phase: Hashable, end: Timestamp = None) -> None:
        """End a phase, now or at this time, and begin the next one."""
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


class PhaseTimes:
    """Measures how long the phases of a loop take.

    Attributes:
        timed: whether the batch in progress, or the next one, is timed.
        remaining: how many batches end before the next one is timed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._is_on = device is not None
        self.timed = self._is_on
        self.remaining: float = 1 if self._is_on else math.inf
        self._clock = PhaseClock(device or torch.device("cpu"))
        self._random = random.Random(0)  # training's random numbers are not consumed
        self._weight = 1  # how many batches the next timed one counts for
        self._uncounted = 0  # batches of which no timed one counts
        self._began = self._idle_since = self._last_taken = perf_counter()
        self._nested = 0
        self._measured = dict.fromkeys(PHASES, 0.0)  # hooks that are called in a phase included
        self._before = dict.fromkeys(PHASES, 0.0)  # the estimates at the last report
        self._taken = dict.fromkeys(PHASES, 0.0)

    # -- batches ----------------------------------------------------------------------------------

    def wait_for_data(self) -> None:
        """Time the next batch, from here: the first of an epoch may take long to load."""
        if self._is_on:
            self._uncounted += self._weight - int(self.remaining)
            self._weight, self.remaining, self.timed = 1, 1, True
            self._restart()

    def begin_batch(self, waited: float | None = None) -> None:
        """End the phase `data` of a timed batch, which took these seconds, if they are known."""
        self._began = perf_counter()
        self._clock.weight = self._weight
        waited = self._began - self._idle_since if waited is None else waited
        self._clock.add("data", waited * 1e3)
        self._clock.start()

    def end_micro_batch(self) -> None:
        """End a batch that completes no step, in a loop whose `end_batch` is that of a step."""
        self._idle_since = perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase of a timed batch."""
        self._clock.lap(phase)

    def end_batch(self) -> bool:
        """End a batch; return whether the next one is timed."""
        if self.timed:
            self.remaining = self._weight = self._choose_gap()
            self._weight += self._uncounted
            self._uncounted = 0
        else:
            self.remaining -= 1
        self.timed = self.remaining <= 1
        if self.timed:
            self._restart()
        return self.timed

    def _restart(self) -> None:
        self._began = self._idle_since = perf_counter()
        self._clock.weight = self._weight
        self._clock.start()

    def _choose_gap(self) -> int:
        """Return after how many batches the next one is timed."""
        seconds = max(perf_counter() - self._began, 1e-9)
        cost = _DEVICE_SECONDS if self._clock.is_device else _CPU_SECONDS
        mean = min(math.ceil(cost / (_OF_CLOCKS * seconds)), 1000)
        return self._random.randint(1, 2 * mean - 1)

    @contextmanager
    def span(self, phase: str) -> Generator[None]:
        """Measure what happens within the block; a block within another one counts as that."""
        began = self.begin_span()
        try:
            yield
        finally:
            self.end_span(phase, began)

    def begin_span(self) -> float:
        """Begin a phase between two steps; return when."""
        self._nested += 1
        return perf_counter()

    def end_span(self, phase: str, began: float) -> None:
        """End a phase that has begun at this time."""
        self._nested -= 1
        if self._is_on and not self._nested:
            seconds = perf_counter() - began
            self._measured[phase] += seconds
            batch_began = self._began + seconds  # the batch takes no longer for it
            if self.timed:
                self._restart()
            self._began = batch_began

    # -- reports ----------------------------------------------------------------------------------

    def take(self, hook_seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each phase since the last time.

        Args:
            hook_seconds: the time of all hooks so far, by event; by method, for probes.
        """
        for phase, (milliseconds, _) in self._clock.take().items():
            self._measured[str(phase)] += milliseconds / 1e3
        now = self._without_hooks(hook_seconds)
        since = {phase: max(0.0, now[phase] - self._before[phase]) for phase in PHASES}
        self._before = {phase: max(now[phase], self._before[phase]) for phase in PHASES}
        time = perf_counter()
        elapsed, self._last_taken = time - self._last_taken, time
        room = max(0.0, elapsed - since["validation"] - since["checkpoints"])
        if self._clock.is_device:  # it works while the CPU does something else
            _fit(since, _ON_DEVICE, room)
            _fit(since, ("data", "hooks"), room)
        else:
            _fit(since, ("data", "hooks", *_ON_DEVICE), room)
        since["other"] = max(0.0, elapsed - sum(since.values()))
        for phase, seconds in since.items():
            self._taken[phase] += seconds
        return since

    def totals(self) -> dict[str, float]:
        """Return all seconds that `take` has returned."""
        return dict(self._taken)

    def _without_hooks(self, hook_seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the time of each phase, without the hooks that were called in it."""
        times = {**self._measured, "hooks": sum(hook_seconds.values()), "other": 0.0}
        for event, seconds in hook_seconds.items():
            is_probe = not event.startswith("on_") and event != "update"
            phase = "forward" if is_probe else _PHASE_OF_EVENT.get(event)
            if phase is not None:
                times[phase] = max(0.0, times[phase] - seconds)
        return times


def _fit(seconds: dict[str, float], phases: tuple[str, ...], room: float) -> None:
    """Reduce the estimates of phases in proportion, if together they exceed the time they had."""
    total = sum(seconds[phase] for phase in phases)
    if total > room:
        for phase in phases:
            seconds[phase] *= room / total
