"""The record of a run: a folder with a manifest, metrics, events and checkpoints.

`Run` writes one, `open_run` reads one. Names are loaded when first used: reading needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.errors import RunError
from hookline.lazy import lazily

if TYPE_CHECKING:
    from hookline.runs.diff import diff_runs
    from hookline.runs.journal import read_records
    from hookline.runs.opened import OpenedRun, open_run
    from hookline.runs.run import Run
    from hookline.runs.saved import SavedCheckpoint

__all__ = [
    "OpenedRun",
    "Run",
    "RunError",
    "SavedCheckpoint",
    "diff_runs",
    "open_run",
    "read_records",
]

__getattr__ = lazily(
    __name__,
    {
        "diff": ("diff_runs",),
        "journal": ("read_records",),
        "opened": ("OpenedRun", "open_run"),
        "run": ("Run",),
        "saved": ("SavedCheckpoint",),
    },
)
