"""TorchProfiler: PyTorch's own profiler, on a schedule."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt

from hookline.errors import ConfigError
from hookline.hook import Rank
from hookline.options import BuiltIn

__all__ = ["TorchProfiler"]

log = logging.getLogger("hookline")


class TorchProfiler(BuiltIn):
    """Records steps with `torch.profiler` and writes traces for chrome://tracing and Perfetto.

    Each cycle of `wait`, `warmup` and `active` steps leaves one file,
    `trace_step_<the last step>.json`. Training that ends within the active steps leaves a file
    with those that were recorded.

    Args:
        wait: steps in which nothing is recorded.
        warmup: steps that are recorded and thrown away, as the first ones are slower.
        active: steps that are recorded.
        repeat: how many cycles; 0: until training ends.
        folder: where traces go; None: `profile` in the run's folder.
        record_shapes: record the shapes of inputs.
        profile_memory: record what is allocated and freed.
        with_stack: record the lines of code.
    """

    cost = (
        "Recorded steps are slower, with `with_stack` several times. Nothing after the last cycle."
    )
    hookline_rank = Rank.MONITOR

    def __init__(
        self,
        wait: NonNegativeInt = 1,
        warmup: NonNegativeInt = 1,
        active: PositiveInt = 3,
        repeat: NonNegativeInt = 1,
        folder: Path | str | None = None,
        *,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.repeat = repeat
        self.folder = folder
        self.record_shapes = record_shapes
        self.profile_memory = profile_memory
        self.with_stack = with_stack
        self._profiler: Any = None
        self._into = Path()
        self._step = 0
        self._steps_left = 0
        self._cycles_begun = 0

    def on_train_start(self, trainer: Any, step: int) -> None:
        """Begin the first cycle."""
        self._stop()  # of an earlier training that never ended
        self._into = self._where(trainer)
        self._step = step
        self._cycles_begun = 0
        self._begin_cycle()

    def on_step_end(self, step: int) -> None:
        """Tell the profiler that a step is over."""
        if self._profiler is None:
            return
        self._step = step
        self._steps_left -= 1
        if self._steps_left:
            self._profiler.step()
            return
        self._stop()  # writes the trace
        if not self.repeat or self._cycles_begun < self.repeat:
            self._begin_cycle()

    def _begin_cycle(self) -> None:
        # A profiler for each: one that goes on for several cycles warns of it, and where warnings
        # are errors, it is left in a state in which PyTorch crashes.
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=self.wait, warmup=self.warmup, active=self.active, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        profiler.start()
        self._profiler = profiler
        self._steps_left = self.wait + self.warmup + self.active
        self._cycles_begun += 1

    def on_train_end(self) -> None:
        """Stop, and write what was recorded so far."""
        self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _where(self, trainer: Any) -> Path:
        if self.folder is not None:
            folder = Path(self.folder)
        else:
            run = getattr(trainer, "run", None)
            if run is None:
                raise ConfigError(
                    "TorchProfiler has nowhere to write: this training has no run folder. Name a "
                    "folder, TorchProfiler(folder='…'), or let the trainer record runs."
                )
            folder = Path(run.path) / "profile"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"TorchProfiler cannot write into {folder}: {error}. Name another folder."
            ) from error
        return folder

    def _write(self, profiler: Any) -> None:
        stem = f"trace_step_{self._step:06d}"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            stem += f"_rank_{torch.distributed.get_rank()}"
        path = self._into / f"{stem}.json"
        number = 1
        while path.exists():  # a resumed run has been at this step before
            number += 1
            path = self._into / f"{stem}_{number}.json"
        profiler.export_chrome_trace(str(path))
        if path.exists():
            log.info("TorchProfiler has written %s", path)
        else:  # PyTorch says why on stderr, and returns as if all was well
            log.warning("TorchProfiler could not write %s. Is its folder still there?", path)
