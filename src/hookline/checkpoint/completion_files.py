"""Checkpoints of other libraries, with a completion file when they are complete.

It has the names, sizes and hashes of all files of the checkpoint, and is written last, when they
are on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from hookline.checkpoint.atomic_files import hash_file, sync, write_atomic
from hookline.checkpoint.catalog import (
    InvalidCheckpointError,
    check_files,
    check_hashes,
    is_checkpoint,
    read_json,
)
from hookline.files import file_limits

log = logging.getLogger("hookline")

HOOKS_FOLDER = "hookline"
"""The folder within another library's checkpoint that has the state of the hooks."""

_COMPLETION_FILE = "hookline_complete.json"
_NAME = re.compile(r"checkpoint-(\d{1,18})")


def write_completion_file(folder: Path) -> None:
    """Flush the files of a checkpoint to the disk, and write the completion file."""
    files: dict[str, Any] = {}
    folders: list[Path] = []
    for root, _, names in os.walk(folder):
        folders.append(Path(root))
        for name in names:
            path = Path(root, name)
            if name != _COMPLETION_FILE and path.is_file() and not path.is_symlink():
                sync(path)
                size = path.stat().st_size
                files[path.relative_to(folder).as_posix()] = {"size": size, "xxh3": hash_file(path)}
    for each in reversed(folders):
        sync(each)
    write_atomic(folder / _COMPLETION_FILE, json.dumps({"version": 1, "files": files}, indent=1))
    sync(folder.parent)


def remove_completion_file(folder: Path, name: str = HOOKS_FOLDER) -> None:
    """Remove also what the hooks have written: the library saves this checkpoint again."""
    (folder / _COMPLETION_FILE).unlink(missing_ok=True)
    if is_checkpoint(folder / name):
        shutil.rmtree(folder / name)


def describe_incomplete(folder: Path, *, verify: bool = True) -> str | None:
    """Return what is missing or damaged in a checkpoint; None if it is complete."""
    try:
        facts = read_json(folder / _COMPLETION_FILE, file_limits.manifest_bytes)
        files = {name: {"size": one["size"], "xxh3_64": one["xxh3"]} for name, one in _items(facts)}
        check_files(folder, {"files": files})
        if verify:
            check_hashes(folder, {"files": files})
    except InvalidCheckpointError as error:
        return str(error)
    except (LookupError, TypeError, AttributeError):
        return f"{_COMPLETION_FILE} is not valid"
    return None


def _items(facts: Any) -> list[tuple[str, Any]]:
    """Return the files of a completion file; raise LookupError if one is not in the folder."""
    items = list(facts["files"].items())
    names = [Path(name) for name, _ in items]
    if facts["version"] != 1 or any(name.is_absolute() or ".." in name.parts for name in names):
        raise LookupError
    return items


def find_transformers_checkpoint(folder: Path, *, verify: bool = True) -> Path | None:
    """Return the newest complete `checkpoint-<step>` of Hugging Face in a folder, or None."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            found[int(match[1])] = path
    for step in sorted(found, reverse=True):
        problem = describe_incomplete(found[step], verify=verify)
        if problem is None:
            return found[step]
        log.warning("The checkpoint %s is skipped: %s.", found[step], problem)
    if found and not any((path / _COMPLETION_FILE).exists() for path in found.values()):
        log.warning(
            "No checkpoint in %s has a completion file: were they saved without Hookline? Check "
            "the newest one, %s, and resume from it by name.",
            folder,
            found[max(found)].name,
        )
    return None
