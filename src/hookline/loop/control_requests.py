"""Requests of hooks and users to the loop, kept until the next step boundary."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from hookline.arguments import as_reason, check_whole_number, show_value
from hookline.errors import ArgumentError

_GRACE = 30.0  # seconds between SIGTERM and SIGKILL: the default of Slurm, torchrun and Kubernetes
_USED = 0.8  # the fraction of them that hooks may use; the run is closed afterwards


class SaveRequest(NamedTuple):
    """A request to save a checkpoint.

    Attributes:
        path: the checkpoint's folder; None for one in the run's folder.
        weights_only: save the model's weights, and not what is needed to resume.
    """

    path: Path | str | None = None
    weights_only: bool = False


def split_requests(requests: Sequence[SaveRequest]) -> list[list[SaveRequest]]:
    """Return the requests of each save: those for weights only, and those for everything.

    The one that is larger comes last, so that training does not wait until it is written.
    """
    kinds = [[one for one in requests if one.weights_only is only] for only in (True, False)]
    return [kind for kind in kinds if kind]


def includes_full_save(requests: Sequence[SaveRequest], run_folder: Path | None) -> bool:
    """Return whether one of the requests saves everything, into a run's folder of checkpoints."""
    full = (one.path for one in requests if not one.weights_only)
    return any(path is None or Path(path).parent == run_folder for path in full)


class ControlRequests:
    """Requests to stop, to save checkpoints and to skip optimizer steps.

    Attributes:
        pending: whether there is any request: the loop checks nothing else in each step.
        signal: the signal that asked the process to end.
        ends_for: the signal for which training ends, which another process may have received.
        is_requeued: whether the job was requeued, so that its scheduler will send SIGTERM.
    """

    def __init__(self, grace_seconds: float | None = None) -> None:
        self.grace_seconds = grace_seconds
        self.pending = self.is_requeued = False
        self.received_at = 0.0
        self.stop_reason: str | None = None
        self.signal: signal.Signals | None = None
        self.ends_for: signal.Signals | None = None
        self.checkpoints: list[SaveRequest] = []
        self.skips: dict[int, str] = {}  # by optimizer, with the reason; -1 stands for all

    def stop(self, reason: str) -> None:
        """Request to stop training; the first reason is kept."""
        if self.stop_reason is None:
            self.stop_reason = as_reason(reason)
        self.pending = True

    def receive_signal(self, received: signal.Signals) -> None:
        """Note a signal; called by its handler, so it does nothing else."""
        self.signal = received
        self.received_at = monotonic()
        self.pending = True

    def end_for(self, received: signal.Signals) -> None:
        """Note for which signal all processes end; this one may still receive it, as its first."""
        self.ends_for = received
        self.received_at = self.received_at or monotonic()

    @property
    def has_signal(self) -> bool:
        """Whether this process, or all of them, end for a signal."""
        return self.ends_for is not None or self.signal is not None

    def wake(self) -> None:
        """Make the loop apply requests at the next boundary."""
        self.pending = True

    def settle(self, *, saving: bool) -> None:
        """Set `pending` again after requests were applied.

        `saving` says that the next boundary has to prepare a save, or to report one.
        """
        self.pending = bool(self.skips or self.checkpoints or saving)
        if self.signal is not None:  # last: a handler may run between two instructions
            self.pending = True

    def checkpoint(self, request: SaveRequest) -> None:
        """Request a checkpoint."""
        if request not in self.checkpoints:
            self.checkpoints.append(request)
        self.pending = True

    def skip(self, idx: int | None, reason: str, optimizers: int) -> None:
        """Request to skip the next step of one of so many optimizers, or of all of them (None)."""
        if idx is not None:
            check_whole_number("skip_optimizer_step(idx)", idx)
            if idx >= optimizers:
                there_are = f"there are {optimizers}"
                raise ArgumentError(f"There is no optimizer {show_value(idx)}; {there_are}.")
        self.skips[-1 if idx is None else idx] = as_reason(reason) or "a hook asked"
        self.pending = True

    def seconds_before_kill(self) -> float | None:
        """Return how long hooks may take after a signal; None if the process may go on.

        It is the time until the scheduler kills the process, less what is needed to close the run.
        """
        if (self.ends_for or self.signal) in (None, signal.SIGINT):
            return None
        grace = self.grace_seconds or elastic_timeout() or _GRACE
        return max(0.0, self.received_at + _USED * grace - monotonic())

    def why_skipped(self, idx: int) -> str:
        """Return why this optimizer's step is skipped, "" if it is not."""
        return self.skips.get(idx, self.skips.get(-1, ""))


def elastic_timeout() -> float | None:
    """Return the seconds that torchrun waits between a signal and killing the process."""
    try:
        return float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    except (KeyError, ValueError):
        return None
