"""Runs on disk: a folder with a manifest, metrics, events and checkpoints.

`Run` writes a run, `open_run` reads one. Names are loaded when first used: reading does not need
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.errors import RunError
from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.runs.checkpoint_reader import SavedCheckpoint, get_last_checkpoint
    from hookline.runs.diff import diff_runs
    from hookline.runs.jsonl_reader import read_records
    from hookline.runs.reader import OpenedRun, open_run
    from hookline.runs.run import Run

__all__ = [
    "OpenedRun",
    "Run",
    "RunError",
    "SavedCheckpoint",
    "diff_runs",
    "get_last_checkpoint",
    "open_run",
    "read_records",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "diff": ("diff_runs",),
        "jsonl_reader": ("read_records",),
        "reader": ("OpenedRun", "open_run"),
        "run": ("Run",),
        "checkpoint_reader": ("SavedCheckpoint", "get_last_checkpoint"),
    },
)
