"""RuntimeProfile: where the time of a batch goes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from pydantic import PositiveInt

from hookline.hook import Rank
from hookline.loop.evaluation import samples_in
from hookline.loop.event_context import device_of
from hookline.options import BuiltIn

__all__ = ["RuntimeProfile"]

PHASES = ("data", "forward", "backward", "optimizer")


class RuntimeProfile(BuiltIn):
    """Logs where time goes: per loader and phase, samples and tokens per second, memory.

    `profile/train/dl_<loader>/time_<phase>_ms` is the mean since the last report, of:

    - `data`: from the end of a batch to the next; validation and checkpoints do not count.
    - `forward`: from there until the loss is known.
    - `backward`.
    - `optimizer`: clipping, the step and its schedulers, in batches that complete a step.

    `profile/train/samples_per_second` and `profile/train/tokens_per_second` are over all the time
    but that of validation and checkpoints; with a schedule, such as `every=10`, only over batches
    whose loading it has seen, too. `profile/memory_peak_mb` is the most that was allocated on an
    accelerator so far; `profile/memory_resident_mb`, without one, what the process holds.

    On an accelerator all phases but `data` are timed on the device itself: a wall clock would
    measure how long it takes to ask for work, not to do it.

    Args:
        log_frequency: report in each N-th optimizer step.
    """

    cost = (
        "A clock is read, or on an accelerator an event recorded, four times per batch; nothing "
        "waits for the device."
    )
    hookline_rank = Rank.MONITOR
    hookline_optional_events = frozenset({"on_validation_end", "on_checkpoint_save"})

    def __init__(self, log_frequency: PositiveInt = 50) -> None:
        self.log_frequency = log_frequency
        self._device = torch.device("cpu")
        self._clock: Clock = HostClock()
        self._reported = self._step = 0
        self._tokens_then = 0  # when the last batch that it has seen ended
        # Since when the next batch is waited for, and counts; unknown before the first it has seen.
        self._idle_since: float | None = None
        self._counts_since: float | None = None
        self._has_turn = False
        self._times = _Times()
        self._loaders: dict[str, _Times] = {}
        self._seconds = 0.0
        self._samples = self._tokens = 0

    def on_train_start(self, model: torch.nn.Module, step: int, tokens_seen: int = 0) -> None:
        """Start the clock."""
        self._device = device_of(model)
        self._clock = clock_for(self._device)
        self._reported = self._step = step
        self._tokens_then = tokens_seen
        self._loaders = {}
        self._forget()
        self._pause_ends()

    def on_train_batch_start(self, dataloader_name: str, step: int, tokens_seen: int = 0) -> None:
        """The batch is there: until now, it was waited for."""
        if step != self._step:  # it has not seen the steps before, nor since when this was awaited
            self._step, self._tokens_then = step, tokens_seen
            self._idle_since = self._counts_since = None
        times = self._loaders.get(dataloader_name)
        if times is None:
            times = self._loaders[dataloader_name] = _Times()
        self._times = times
        if self._idle_since is not None:
            times.add("data", perf_counter() - self._idle_since)
        self._has_turn = False
        self._clock.start()

    def on_before_backward(self) -> None:
        """The loss is there."""
        self._clock.lap(self._times, "forward")

    def on_after_backward(self) -> None:
        """The gradients are there."""
        self._clock.lap(self._times, "backward")

    def on_before_optimizer_step(self) -> None:
        """This batch completes a step."""
        self._has_turn = True

    def on_train_batch_end(self, batch: Any, tokens_seen: int = 0) -> None:
        """The batch is done."""
        if self._has_turn:
            self._clock.lap(self._times, "optimizer")
        now = perf_counter()
        if self._counts_since is not None:
            self._samples += samples_in(batch)
            self._tokens += tokens_seen - self._tokens_then
            self._seconds += now - self._counts_since
        self._tokens_then = tokens_seen
        self._counts_since = self._idle_since = now

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Report, if it is time to."""
        if step % self.log_frequency == 0 and step != self._reported:
            self._reported = step
            for name, value in self._report():
                trainer.log(name, value)
            self._forget()
        self._step = step
        self._idle_since = perf_counter()  # what hooks did since the batch was no waiting for data

    def on_validation_end(self) -> None:
        """Validation counts for nothing."""
        self._pause_ends()

    def on_checkpoint_save(self) -> None:
        """Nor does a checkpoint."""
        self._pause_ends()

    def _pause_ends(self) -> None:
        self._idle_since = self._counts_since = perf_counter()

    def _forget(self) -> None:
        for times in self._loaders.values():
            times.clear()  # in place: what a device has not timed yet counts for the next report
        self._seconds = 0.0
        self._samples = self._tokens = 0

    def _report(self) -> Iterator[tuple[str, float]]:
        self._clock.settle()
        for loader, times in self._loaders.items():
            for phase, mean in times.means():
                yield f"profile/train/dl_{loader}/time_{phase}_ms", mean * 1e3
        if self._seconds:
            yield "profile/train/samples_per_second", self._samples / self._seconds
            if self._tokens:
                yield "profile/train/tokens_per_second", self._tokens / self._seconds
        yield from _memory(self._device)


class _Times:
    """Seconds by phase, and how often each was."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.counts: dict[str, int] = dict.fromkeys(PHASES, 0)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] += seconds
        self.counts[phase] += 1

    def means(self) -> Iterator[tuple[str, float]]:
        for phase in PHASES:
            if self.counts[phase]:
                yield phase, self.seconds[phase] / self.counts[phase]


# -- clocks ---------------------------------------------------------------------------------------


class Clock(Protocol):
    """Times what follows one another."""

    def start(self) -> None:
        """Begin."""
        ...

    def lap(self, times: _Times, phase: str) -> None:
        """End a phase, and begin the next."""
        ...

    def settle(self) -> None:
        """Count the phases whose times are known by now."""
        ...


class HostClock:
    """A wall clock: on a CPU, what was called is done when it returns."""

    def __init__(self) -> None:
        self._last = 0.0

    def start(self) -> None:
        """Begin."""
        self._last = perf_counter()

    def lap(self, times: _Times, phase: str) -> None:
        """End a phase, and begin the next."""
        now = perf_counter()
        times.add(phase, now - self._last)
        self._last = now

    def settle(self) -> None:
        """Nothing is open."""


class DeviceClock:
    """Events in the device's own queue, which it stamps as it gets there. Nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: Any = None
        self._open: deque[tuple[_Times, str, Any, Any]] = deque()

    def start(self) -> None:
        """Begin."""
        self._last = self._stamp()

    def lap(self, times: _Times, phase: str) -> None:
        """End a phase, and begin the next."""
        stamp = self._stamp()
        self._open.append((times, phase, self._last, stamp))
        self._last = stamp

    def settle(self) -> None:
        """Count the phases that the device has come to the end of."""
        while self._open and self._open[0][3].query():
            times, phase, begin, end = self._open.popleft()
            times.add(phase, begin.elapsed_time(end) / 1e3)

    def _stamp(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def clock_for(device: torch.device) -> Clock:
    """Return the clock that tells the truth about this device."""
    if device.type == "cpu":
        return HostClock()
    try:
        clock = DeviceClock(device)
        clock.start()
    except (RuntimeError, NotImplementedError, TypeError):  # a device without timed events
        return HostClock()
    return clock


# -- memory ---------------------------------------------------------------------------------------


def _memory(device: torch.device) -> Iterator[tuple[str, float]]:
    peak = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    if peak is not None:
        yield "profile/memory_peak_mb", peak(device) / 1e6
        return
    if sys.platform.startswith("linux"):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield "profile/memory_resident_mb", pages * resource.getpagesize() / 1e6
