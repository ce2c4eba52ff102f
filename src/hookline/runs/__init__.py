"""The record of a run: a folder with a manifest, metrics, events and checkpoints.

`Run` writes one, `open_run` reads one. Names are loaded when first used: reading needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hookline.errors import RunError

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

_WHERE = {
    "OpenedRun": "hookline.runs.opened",
    "Run": "hookline.runs.run",
    "SavedCheckpoint": "hookline.runs.saved",
    "diff_runs": "hookline.runs.diff",
    "open_run": "hookline.runs.opened",
    "read_records": "hookline.runs.journal",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hookline.runs' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
