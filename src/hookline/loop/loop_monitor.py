"""What a run has of its loop every few seconds: the system, where the time went, and the tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hookline.dispatch import HookManager
from hookline.loop.phase_times import PhaseTimes
from hookline.runs.run import Run
from hookline.runs.system_sampler import SystemSampler

__all__ = ["LoopMonitor"]


class LoopMonitor:
    """Records the system, the time of each phase and the tokens, on the training thread.

    A thread takes a sample of the system every few seconds; it is recorded at the end of the step
    that training has reached then.

    Args:
        run: the run that is written.
        device: where the model is trained.
        hooks: the hooks, whose time is known from their accounting.
        tokens: returns the number of tokens trained on; None if it is not known.

    Attributes:
        sampler: has a sample when it is time to record.
        phases: the time of each phase.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        hooks: HookManager,
        tokens: Callable[[], int | None],
    ) -> None:
        self.sampler = SystemSampler(run.path, device)
        self.phases = PhaseTimes(device)
        self._run, self._hooks, self._tokens = run, hooks, tokens
        self._earlier = self._hook_seconds()  # of a training before, with the same hooks
        self._cleanup = weakref.finalize(self, self.sampler.stop)
        self._cleanup.atexit = False

    def record(self, step: int, epoch: int | None) -> None:
        """Record the newest sample, and what was measured since the last one."""
        values: dict[str, float] = self.sampler.take()
        times = self._take_times()
        values |= {f"time/{phase}": seconds for phase, seconds in times.items()}
        if (tokens := self._tokens()) is not None:
            values["train/tokens_seen"] = tokens
        self._run.log_metrics(step, epoch, values)

    def close(self) -> dict[str, Any]:
        """End the thread; return the time of each phase, and the tokens, for the last event."""
        self.sampler.stop()
        self._cleanup.detach()
        self._take_times()
        return {"times": self.phases.totals(), "tokens_seen": self._tokens()}

    def _take_times(self) -> dict[str, float]:
        now = self._hook_seconds()
        return self.phases.take({e: max(0.0, now[e] - self._earlier.get(e, 0.0)) for e in now})

    def _hook_seconds(self) -> Mapping[str, float]:
        """Return the time of all hooks by event."""
        seconds: dict[str, float] = {}
        for info in self._hooks.summary().hooks:
            for event, cost in info.costs.items():
                seconds[event] = seconds.get(event, 0.0) + cost.seconds
        return seconds
