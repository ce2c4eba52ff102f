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
    """Records steps with `torch.profiler` and writes a trace for chrome://tracing and Perfetto.

    The file is `trace_step_<the last step>.json`. If training ends within the active steps, it
    contains the steps recorded so far.

    Args:
        wait: the number of steps that are not recorded.
        warmup: the number of steps that are recorded and discarded, because they are slower.
        active: the number of steps that are recorded.
        folder: the folder for the trace; None: `profile` in the run's folder.
        profile_memory: record allocations.
    """

    cost = "Recorded steps are slower. Nothing after them."
    hookline_group = HookGroup.MONITOR
    ranks = "main"

    def __init__(
        self,
        wait: NonNegativeInt = 1,
        warmup: NonNegativeInt = 1,
        active: PositiveInt = 3,
        folder: Path | str | None = None,
        *,
        profile_memory: bool = False,
    ) -> None:
        self.wait, self.warmup, self.active = wait, warmup, active
        self.folder = folder
        self.profile_memory = profile_memory
        self._profiler: Any = None
        self._trace_folder = Path()
        self._step = self._steps_left = 0

    def on_train_start(self, trainer: Any, step: int) -> None:
        self._stop()  # if an earlier training run never ended
        self._trace_folder = self._make_folder(trainer)
        self._step = step
        self._steps_left = self.wait + self.warmup + self.active
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=self.wait, warmup=self.warmup, active=self.active, repeat=1
            ),
            on_trace_ready=self._write,
            profile_memory=self.profile_memory,
        )
        self._profiler.start()

    def on_step_end(self, step: int) -> None:
        if self._profiler is None:
            return
        self._step = step
        self._steps_left -= 1
        if self._steps_left:
            self._profiler.step()
        else:
            self._stop()  # writes the trace

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
