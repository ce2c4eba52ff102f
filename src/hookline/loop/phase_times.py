"""Where the time of a training loop goes: data, forward, backward, optimizer, hooks and the rest.

Batches that take long are all timed. Of short ones, some are, at random intervals, so that reading
clocks takes about 0.1 % of the time; they count for the others, but all phases together never for
more than the time that has passed. The time of hooks is known from their own accounting, and is not
part of the phase in which they are called.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch

from hookline.loop.phase_clock import PhaseClock

__all__ = ["PHASES", "PhaseTimes"]

PHASES = (
    *("data", "forward", "backward", "optimizer"),
    *("hooks", "validation", "checkpoints", "other"),
)

_ON_DEVICE = ("forward", "backward", "optimizer")  # timed by the device, if it can
_OF_CLOCKS = 0.001  # the share of the time that clocks may take
_HOST_SECONDS, _DEVICE_SECONDS = 7e-6, 40e-6  # what timing a batch takes

# In which phase an event is fired; other events are fired between phases.
_PHASE_OF_EVENT = {
    **dict.fromkeys(
        ("on_train_batch_start", "on_before_forward", "forward", "on_after_forward"), "forward"
    ),
    "on_before_backward": "forward",
    "on_after_backward": "backward",
    **dict.fromkeys(("on_gradients_ready", "update", "on_gradient_clip"), "optimizer"),
    **dict.fromkeys(("on_before_optimizer_step", "on_after_optimizer_step"), "optimizer"),
    "on_step_skipped": "optimizer",
    **dict.fromkeys(("on_validation_start", "on_validation_end"), "validation"),
    **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), "validation"),
    "on_checkpoint_save": "checkpoints",
}


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

    def begin_batch(self) -> None:
        """End the phase `data` of a timed batch."""
        self._began = perf_counter()
        self._clock.weight = self._weight
        self._clock.add("data", (self._began - self._idle_since) * 1e3)
        self._clock.start()

    def end_part(self) -> None:
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
        cost = _DEVICE_SECONDS if self._clock.is_device else _HOST_SECONDS
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
        if self._clock.is_device:  # it works while the host does something else
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
