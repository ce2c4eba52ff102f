"""What hooks and users have asked the loop for, until it gets to a boundary where it acts."""

from __future__ import annotations

from pathlib import Path

__all__ = ["Wishes"]


class Wishes:
    """To stop, to save checkpoints, to leave out optimizer steps.

    `any` says whether there is anything to look at: the loop looks at nothing else in each step.
    """

    def __init__(self) -> None:
        self.any = False
        self.stop_reason: str | None = None
        self.checkpoints: list[Path | str | None] = []
        self.skips: dict[int, str] = {}  # by optimizer, with the reason; -1 stands for all

    def stop(self, reason: str) -> None:
        """End training; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self.any = True

    def checkpoint(self, path: Path | str | None) -> None:
        """Save a checkpoint here; None: where the run keeps them."""
        if path not in self.checkpoints:
            self.checkpoints.append(path)
        self.any = True

    def skip(self, idx: int, reason: str) -> None:
        """Leave out an optimizer's next step."""
        self.skips[idx] = reason
        self.any = True

    def why_skipped(self, idx: int) -> str:
        """Return why this optimizer does not step, "" when it does."""
        return self.skips.get(idx, self.skips.get(-1, ""))
