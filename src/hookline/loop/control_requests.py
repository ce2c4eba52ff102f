"""Requests of hooks and users to the loop, kept until the next step boundary."""

from __future__ import annotations

import signal
from pathlib import Path

from hookline.arguments import as_reason

__all__ = ["ControlRequests"]


class ControlRequests:
    """Requests to stop, to save checkpoints and to skip optimizer steps.

    Attributes:
        pending: whether there is any request: the loop checks nothing else in each step.
        signal: the signal that asked the process to end.
    """

    def __init__(self) -> None:
        self.pending = False
        self.stop_reason: str | None = None
        self.signal: signal.Signals | None = None
        self.checkpoints: list[Path | str | None] = []
        self.skips: dict[int, str] = {}  # by optimizer, with the reason; -1 stands for all

    def stop(self, reason: str) -> None:
        """Request to stop training; the first reason is kept."""
        if self.stop_reason is None:
            self.stop_reason = as_reason(reason)
        self.pending = True

    def receive_signal(self, received: signal.Signals) -> None:
        """Note a signal; called by its handler, so it does nothing else."""
        self.signal = received
        self.pending = True

    def wake(self) -> None:
        """Make the loop apply requests at the next boundary."""
        self.pending = True

    def settle(self, *, saving: bool) -> None:
        """Set `pending` again after requests were applied.

        Args:
            saving: whether saving needs the loop at the next boundary: to prepare for it, or to
                report a checkpoint that is being written.
        """
        self.pending = bool(self.skips or self.checkpoints or saving)
        if self.signal is not None:  # last: a handler may run between two instructions
            self.pending = True

    def checkpoint(self, path: Path | str | None) -> None:
        """Request a checkpoint at this path; None for the run's folder."""
        if path not in self.checkpoints:
            self.checkpoints.append(path)
        self.pending = True

    def skip(self, idx: int, reason: str) -> None:
        """Request to skip an optimizer's next step."""
        self.skips[idx] = reason
        self.pending = True

    def why_skipped(self, idx: int) -> str:
        """Return why this optimizer's step is skipped, "" if it is not."""
        return self.skips.get(idx, self.skips.get(-1, ""))
