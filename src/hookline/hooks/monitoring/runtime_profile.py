"""RuntimeProfile: logs how long the phases of a batch take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from pydantic import PositiveInt

from hookline.hook import HookGroup
from hookline.loop.evaluation import samples_in
from hookline.loop.event_context import device_of
from hookline.loop.phase_times import PhaseClock
from hookline.options import BuiltIn
from hookline.tensors.memory import device_peak_mb, resident_mb
from hookline.tensors.timing import Timestamp, elapsed_ms


class RuntimeProfile(BuiltIn):
    """Logs the time per loader and phase, samples and tokens per second, and memory.

    `profile/train/dl_<loader>/time_<phase>_ms` is the mean time since the last report of:

    - `data`: from the end of a batch to the next one, without validation and checkpoints. In a bare
      loop that does not load batches through its session, until the model is called.
    - `forward`: from there until the model returns, the last time before backward.
    - `backward`: from there until backward ends, with the loss.
    - `optimizer`: clipping, the step and its schedulers, in batches that complete a step.

    `profile/train/samples_per_second` and `profile/train/tokens_per_second` are computed over the
    whole time except validation and checkpoints. `profile/memory_peak_mb` is the peak of allocated
    memory on an accelerator, whose phases except `data` are timed on the device itself; without
    one, `profile/memory_resident_mb` is the memory of the process.

    Args:
        every: report every N optimizer steps.
    """

    every_name = "log_frequency"
    cost = (
        "Reads a clock, or on an accelerator records an event, five times per batch; it does not "
        "wait for the device."
    )
    hookline_group = HookGroup.MONITOR
    ranks = "main"
    hookline_records = True
    hookline_optional_events = frozenset(
        {
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_backward",
            "on_validation_end",
            "on_checkpoint_save",
        }
    )

    def __init__(self, every: PositiveInt = 50) -> None:
        self.every = every
        self._begin(torch.device("cpu"), 0, 0)

    def _begin(self, device: torch.device, step: int, tokens_seen: int) -> None:
        self._device = device
        self._clock = PhaseClock(device)
        self._reported = self._step = step
        self._tokens_before = tokens_seen  # at the end of the last batch that was measured
        # When waiting for the next batch, and its time for throughput, began; None if not measured.
        self._idle_since: float | None = None
        self._throughput_since: float | None = None
        self._completes_step = self._has_batches = False
        self._loader = "train"
        self._data_ms: float | None = None  # of the batch in progress
        self._forward_begin: Timestamp = None
        self._forward_end: Timestamp = None  # None after backward
        self._reset()

    def on_train_start(self, model: torch.nn.Module, step: int, tokens_seen: int = 0) -> None:
        self._begin(device_of(model), step, tokens_seen)
        self._resume()

    def on_train_batch_start(self, dataloader_name: str, step: int, tokens_seen: int = 0) -> None:
        """End the data phase, and begin the forward phase."""
        self._has_batches = True
        self._loader = dataloader_name
        self._completes_step = False
        self._begin_forward(step, tokens_seen)

    def on_before_forward(self, step: int, tokens_seen: int = 0) -> None:
        if not self._has_batches:
            self._begin_forward(step, tokens_seen)

    def _begin_forward(self, step: int, tokens_seen: int) -> None:
        if step != self._step:  # steps before were not measured, nor when loading began
            self._tokens_before, self._throughput_since = tokens_seen, None
        since = self._idle_since if step == self._step else None
        self._data_ms = None if since is None else elapsed_ms(since, perf_counter())
        self._step = step
        self._forward_begin, self._forward_end = self._clock.now(), None

    def on_after_forward(self) -> None:
        self._forward_end = self._clock.now()

    def on_before_backward(self) -> None:
        if self._has_batches and self._forward_end is None:  # the model itself was not called
            self._forward_end = self._clock.now()

    def on_after_backward(self) -> None:
        """Count the phases of a batch: only here, since evaluation calls the model, too."""
        if self._forward_begin is None or (self._forward_end is None and not self._has_batches):
            return  # the model was not called since the last backward
        if self._data_ms is not None:
            self._clock.add((self._loader, "data"), self._data_ms)
        self._clock.start(self._forward_begin)
        if self._forward_end is not None:
            self._clock.lap((self._loader, "forward"), self._forward_end)
        self._clock.lap((self._loader, "backward"))
        self._data_ms = self._forward_end = None
        self._forward_begin = self._clock.now()
        self._idle_since = perf_counter()

    def on_before_optimizer_step(self) -> None:
        self._completes_step = True

    def on_train_batch_end(self, batch: Any, tokens_seen: int = 0) -> None:
        """End the optimizer phase, and count samples and tokens."""
        if self._completes_step:
            self._clock.lap((self._loader, "optimizer"))
        self._count(samples_in(batch), tokens_seen)

    def _count(self, samples: int, tokens_seen: int) -> None:
        """Count samples and tokens, and the time since the last ones."""
        now = perf_counter()
        if self._throughput_since is not None:
            self._samples += samples
            self._tokens += tokens_seen - self._tokens_before
            self._seconds += now - self._throughput_since
        self._tokens_before = tokens_seen
        self._throughput_since = self._idle_since = now

    def on_step_end(self, trainer: Any, step: int, tokens_seen: int = 0) -> None:
        if not self._has_batches and self._completes_step:
            self._clock.lap((self._loader, "optimizer"))
            self._completes_step = False
            self._count(0, tokens_seen)  # samples are not known
        if step % self.every == 0 and step != self._reported:
            self._reported = step
            for name, value in self._report():
                trainer.log(name, value)
            self._reset()
        self._step = step
        self._idle_since = perf_counter()  # hooks since the end of the batch do not count as data

    def _resume(self) -> None:
        self._idle_since = self._throughput_since = perf_counter()

    on_validation_end = on_checkpoint_save = _resume

    def _reset(self) -> None:
        self._seconds = 0.0
        self._samples = self._tokens = 0

    def _report(self) -> Iterator[tuple[str, float]]:
        for (loader, phase), (total, count) in self._clock.take().items():
            yield f"profile/train/dl_{loader}/time_{phase}_ms", total / count
        if self._samples:
            yield "profile/train/samples_per_second", self._samples / self._seconds
        if self._tokens:
            yield "profile/train/tokens_per_second", self._tokens / self._seconds
        yield from _memory(self._device)


def _memory(device: torch.device) -> Iterator[tuple[str, float]]:
    peak = device_peak_mb(device)
    if peak is not None:
        yield "profile/memory_peak_mb", peak
    elif sys.platform.startswith("linux"):
        yield "profile/memory_resident_mb", resident_mb()
