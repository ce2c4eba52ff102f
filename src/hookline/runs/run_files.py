"""The files and folders in a run's folder. None of them may be a link that leads out of it.

The run's folder itself may be a link, as may the folder of all runs: the user gave these.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hookline.checkpoint.atomic_files import sync
from hookline.files.regular_files import describe_kind
from hookline.runs.manifest import new_run_id

__all__ = ["create_run_folder", "find_refused_entries", "find_refused_folder"]

_FILES = (
    *("manifest.json", "metrics.jsonl", "events.jsonl", "repeated.jsonl"),
    *("log.jsonl", "log.repeated.jsonl", "heartbeat.json"),
)
_FOLDERS = ("checkpoints", "media", "profile", "trackers")


def create_run_folder(root: Path) -> Path:
    """Create a folder with a new run's id, durably, and if needed the folder of all runs."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
    while True:
        path = root / new_run_id()
        with suppress(FileExistsError):
            path.mkdir()
            sync(root)
            return path


def find_refused_entries(folder: Path) -> list[str]:
    """Return which entries of a run's folder are not opened, such as links, one line each."""
    kinds = {name: describe_kind(folder / name) for name in _FILES}
    refused = [
        f"{name} is {kind}; expected a regular file"
        for name, kind in kinds.items()
        if kind is not None
    ]
    return refused + [one for name in _FOLDERS if (one := find_refused_folder(folder / name))]


def find_refused_folder(folder: Path) -> str | None:
    """Return why a folder in a run's folder is not used; None if it is one, or does not exist."""
    if not os.path.lexists(folder):
        return None
    kind = describe_kind(folder) or "a regular file"
    return None if kind == "a folder" else f"{folder.name} is {kind}; expected a folder"
