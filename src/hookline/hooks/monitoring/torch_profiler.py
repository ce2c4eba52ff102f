"""TorchProfiler: runs PyTorch's profiler on a schedule."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt

from hookline.arguments import user_path
from hookline.errors import ConfigError
from hookline.hook import HookGroup
from hookline.options import BuiltIn

log = logging.getLogger("hookline")


class TorchProfiler(BuiltIn):
    """Records steps with `torch.profiler` and writes traces for chrome://tracing and Perfetto.

    Each cycle of `wait`, `warmup` and `active` steps writes one file,
    `trace_step_<the last step>.json`. If training ends within the active steps, the file contains
    the steps recorded so far.

    Args:
        wait: the number of steps that are not recorded.
        warmup: the number of steps that are recorded and discarded, because they are slower.
        active: the number of steps that are recorded.
        repeat: the number of cycles; 0: until training ends.
        folder: the folder for traces; None: `profile` in the run's folder.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        with_stack: record source lines.
    """

    cost = (
        "Recorded steps are slower, with `with_stack` several times. Nothing after the last cycle."
    )
    hookline_group = HookGroup.MONITOR
    ranks = "main"

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
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        self.folder = folder
        self.record_shapes = record_shapes
        self.profile_memory = profile_memory
        self.with_stack = with_stack
        self._profiler: Any = None
        self._trace_folder = Path()
        self._step = self._steps_left = self._cycles_started = 0

    def on_train_start(self, trainer: Any, step: int) -> None:
        self._stop()  # if an earlier training run never ended
        self._trace_folder = self._make_folder(trainer)
        self._step = step
        self._cycles_started = 0
        self._start_cycle()

    def on_step_end(self, step: int) -> None:
        if self._profiler is None:
            return
        self._step = step
        self._steps_left -= 1
        if self._steps_left:
            self._profiler.step()
            return
        self._stop()  # writes the trace
        if not self.repeat or self._cycles_started < self.repeat:
            self._start_cycle()

    def _start_cycle(self) -> None:
        # One profiler per cycle: a profiler that runs for several cycles issues a warning, and if
        # warnings are errors, it is left in a state in which PyTorch crashes.
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
        self._cycles_started += 1

    def on_train_end(self) -> None:
        self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _make_folder(self, trainer: Any) -> Path:
        run: Any = getattr(trainer, "run", None)
        if self.folder is None and run is None:
            raise ConfigError(
                "TorchProfiler has no folder to write to, because this training run has no run "
                "folder. Pass TorchProfiler(folder='…'), or set `runs` in the configuration."
            )
        folder = Path(run.path) / "profile" if self.folder is None else user_path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, profiler: Any) -> None:
        stem = f"trace_step_{self._step:06d}"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            stem += f"_rank_{torch.distributed.get_rank()}"
        path = self._trace_folder / f"{stem}.json"
        number = 1
        while path.exists():  # a resumed run may reach the same step again
            number += 1
            path = self._trace_folder / f"{stem}_{number}.json"
        profiler.export_chrome_trace(str(path))
        if path.exists():
            log.info("TorchProfiler wrote %s", path)
        else:  # PyTorch prints the reason to stderr and does not raise
            log.warning("TorchProfiler could not write %s. Does its folder still exist?", path)
