"""Requests of hooks and users to the loop, kept until the next step boundary."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ControlRequests"]


class ControlRequests:
    """Requests to stop, to save checkpoints and to skip optimizer steps.

    `pending` is whether there is any request: the loop checks nothing else in each step.
    """

    def __init__(self) -> None:
        self.pending = False
        self.stop_reason: str | None = None
        self.checkpoints: list[Path | str | None] = []
        self.skips: dict[int, str] = {}  # by optimizer, with the reason; -1 stands for all

    def stop(self, reason: str) -> None:
        """End training; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self.pending = True

    def checkpoint(self, path: Path | str | None) -> None:
        """Save a checkpoint here; None: where the run keeps them."""
        if path not in self.checkpoints:
            self.checkpoints.append(path)
        self.pending = True

    def skip(self, idx: int, reason: str) -> None:
        """Leave out an optimizer's next step."""
        self.skips[idx] = reason
        self.pending = True

    def why_skipped(self, idx: int) -> str:
        """Return why this optimizer does not step, "" when it does."""
        return self.skips.get(idx, self.skips.get(-1, ""))
