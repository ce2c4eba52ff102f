"""Checkpoints of other libraries: marked when they are complete, found by the mark.

The mark is a file with the names and sizes of all files of the checkpoint. It is written last, when
they are on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from hookline.checkpoint.atomic_files import sync, write_atomic
from hookline.checkpoint.checkpoint_manifest import InvalidCheckpointError, read_json
from hookline.files.limits import file_limits

__all__ = ["HOOKS_FOLDER", "describe_incomplete", "find_host_checkpoint", "mark_complete"]

log = logging.getLogger("hookline")

HOOKS_FOLDER = "hookline"
"""The folder within a host's checkpoint that has the state of the hooks."""

_MARK = "hookline_complete.json"
_NAME = re.compile(r"checkpoint-(\d{1,18})")


def mark_complete(folder: Path) -> None:
    """Flush the files of a checkpoint to the disk, and mark it as complete."""
    sizes: dict[str, int] = {}
    folders: list[Path] = []
    for root, _, names in os.walk(folder):
        folders.append(Path(root))
        for name in names:
            path = Path(root, name)
            if name != _MARK and path.is_file() and not path.is_symlink():
                sync(path)
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    for each in reversed(folders):
        sync(each)
    write_atomic(folder / _MARK, json.dumps({"version": 1, "files": sizes}, indent=1))
    sync(folder.parent)


def describe_incomplete(folder: Path) -> str | None:
    """Return what is missing in a host's checkpoint; None if it is complete."""
    try:
        mark = read_json(folder / _MARK, file_limits.manifest_bytes)
    except InvalidCheckpointError as error:
        return str(error)
    files = mark.get("files") if isinstance(mark, dict) else None
    if not isinstance(files, dict) or mark.get("version") != 1:
        return f"{_MARK} is not valid"
    for name, size in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{_MARK} names a file outside of the checkpoint"
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def find_host_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete `checkpoint-<step>` of Hugging Face in a folder; None without one.

    Incomplete ones are skipped with a warning.
    """
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            found[int(match[1])] = path
    for step in sorted(found, reverse=True):
        problem = describe_incomplete(found[step])
        if problem is None:
            return found[step]
        log.warning("The checkpoint %s is skipped: %s.", found[step], problem)
    return None
