"""RuntimeProfile: logs how long the phases of a batch take."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from pydantic import PositiveInt

from hookline.hook import Rank
from hookline.loop.evaluation import samples_in
from hookline.loop.event_context import device_of
from hookline.options import BuiltIn
from hookline.tensors.timing import Mark, elapsed_ms, is_over, mark, timed_device

__all__ = ["RuntimeProfile"]

PHASES = ("data", "forward", "backward", "optimizer")


class RuntimeProfile(BuiltIn):
    """Logs the time per loader and phase, samples and tokens per second, and memory.

    `profile/train/dl_<loader>/time_<phase>_ms` is the mean time since the last report of:

    - `data`: from the end of a batch to the next one, without validation and checkpoints.
    - `forward`: from there until the loss is computed.
    - `backward`.
    - `optimizer`: clipping, the step and its schedulers, in batches that complete a step.

    `profile/train/samples_per_second` and `profile/train/tokens_per_second` are computed over the
    whole time except validation and checkpoints; with a schedule such as `every=10`, only over
    batches whose loading was measured too. `profile/memory_peak_mb` is the peak of allocated memory
    on an accelerator; without one, `profile/memory_resident_mb` is the memory of the process.

    On an accelerator all phases except `data` are timed on the device itself, because a wall clock
    would measure how long it takes to launch the work.

    Args:
        log_frequency: report every N optimizer steps.
    """

    cost = (
        "Reads a clock, or on an accelerator records an event, four times per batch; it does not "
        "wait for the device."
    )
    hookline_rank = Rank.MONITOR
    hookline_records = True
    hookline_optional_events = frozenset({"on_validation_end", "on_checkpoint_save"})

    def __init__(self, log_frequency: PositiveInt = 50) -> None:
        self.log_frequency = log_frequency
        self._device = torch.device("cpu")
        self._clock = _PhaseClock(self._device)
        self._reported = self._step = 0
        self._tokens_before = 0  # at the end of the last batch that was measured
        # When waiting for the next batch, and its time for throughput, began; None if not measured.
        self._idle_since: float | None = None
        self._throughput_since: float | None = None
        self._completes_step = False
        self._times = _Times()
        self._loaders: dict[str, _Times] = {}
        self._seconds = 0.0
        self._samples = self._tokens = 0

    def on_train_start(self, model: torch.nn.Module, step: int, tokens_seen: int = 0) -> None:
        """Start the clock."""
        self._device = device_of(model)
        self._clock = _PhaseClock(self._device)
        self._reported = self._step = step
        self._tokens_before = tokens_seen
        self._loaders = {}
        self._reset()
        self._resume()

    def on_train_batch_start(self, dataloader_name: str, step: int, tokens_seen: int = 0) -> None:
        """Measure the time it took to load the batch, and start the forward phase."""
        if step != self._step:  # steps before were not measured, nor when loading began
            self._step, self._tokens_before = step, tokens_seen
            self._idle_since = self._throughput_since = None
        times = self._loaders.get(dataloader_name)
        if times is None:
            times = self._loaders[dataloader_name] = _Times()
        self._times = times
        if self._idle_since is not None:
            times.add("data", elapsed_ms(self._idle_since, perf_counter()))
        self._completes_step = False
        self._clock.start()

    def on_before_backward(self) -> None:
        """End the forward phase."""
        self._clock.lap(self._times, "forward")

    def on_after_backward(self) -> None:
        """End the backward phase."""
        self._clock.lap(self._times, "backward")

    def on_before_optimizer_step(self) -> None:
        """Remember that this batch completes a step."""
        self._completes_step = True

    def on_train_batch_end(self, batch: Any, tokens_seen: int = 0) -> None:
        """End the optimizer phase, and count samples and tokens."""
        if self._completes_step:
            self._clock.lap(self._times, "optimizer")
        now = perf_counter()
        if self._throughput_since is not None:
            self._samples += samples_in(batch)
            self._tokens += tokens_seen - self._tokens_before
            self._seconds += now - self._throughput_since
        self._tokens_before = tokens_seen
        self._throughput_since = self._idle_since = now

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Log a report every N steps."""
        if step % self.log_frequency == 0 and step != self._reported:
            self._reported = step
            for name, value in self._report():
                trainer.log(name, value)
            self._reset()
        self._step = step
        self._idle_since = perf_counter()  # hooks since the end of the batch do not count as data

    def on_validation_end(self) -> None:
        """Exclude the time of validation."""
        self._resume()

    def on_checkpoint_save(self) -> None:
        """Exclude the time of saving."""
        self._resume()

    def _resume(self) -> None:
        self._idle_since = self._throughput_since = perf_counter()

    def _reset(self) -> None:
        for times in self._loaders.values():
            times.clear()  # in place: phases still running on the device count for the next report
        self._seconds = 0.0
        self._samples = self._tokens = 0

    def _report(self) -> Iterator[tuple[str, float]]:
        self._clock.settle()
        for loader, times in self._loaders.items():
            for phase, mean in times.means():
                yield f"profile/train/dl_{loader}/time_{phase}_ms", mean
        if self._seconds:
            yield "profile/train/samples_per_second", self._samples / self._seconds
            if self._tokens:
                yield "profile/train/tokens_per_second", self._tokens / self._seconds
        yield from _memory(self._device)


class _Times:
    """The total milliseconds of each phase, and how often it occurred."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.totals: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.counts: dict[str, int] = dict.fromkeys(PHASES, 0)

    def add(self, phase: str, milliseconds: float) -> None:
        self.totals[phase] += milliseconds
        self.counts[phase] += 1

    def means(self) -> Iterator[tuple[str, float]]:
        for phase in PHASES:
            if self.counts[phase]:
                yield phase, self.totals[phase] / self.counts[phase]


class _PhaseClock:
    """Times consecutive phases: with events of the device if it has them, else by wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = timed_device(device)
        self._last: Mark = 0.0
        self._open: deque[tuple[_Times, str, Mark, Mark]] = deque()

    def start(self) -> None:
        """Begin the first phase."""
        self._last = mark(self._device)

    def lap(self, times: _Times, phase: str) -> None:
        """End a phase, and begin the next one."""
        now = mark(self._device)
        self._open.append((times, phase, self._last, now))
        self._last = now
        if self._device is None:
            self.settle()

    def settle(self) -> None:
        """Add the phases that the device has finished, without waiting for the others."""
        while self._open and is_over(self._open[0][3]):
            times, phase, begin, end = self._open.popleft()
            times.add(phase, elapsed_ms(begin, end))


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
