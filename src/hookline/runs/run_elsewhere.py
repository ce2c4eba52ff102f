"""A run that another process writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["RunElsewhere"]


class RunElsewhere:
    """The run of rank 0, in the other processes: it has an id and a folder, and records nothing.

    Attributes:
        id: the run's id.
        path: its folder.
    """

    lease_lost: str | None = None

    def __init__(self, run_id: str, path: Path) -> None:
        self.id = run_id
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoints"

    def log(self, step: int, epoch: int | None, name: str, value: Any, kind: str = "") -> None:
        """Record nothing: rank 0 does."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record nothing: rank 0 does."""
