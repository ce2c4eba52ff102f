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
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

from hookline.checkpoint.atomic_files import hash_file, hash_stream, sync, write_atomic
from hookline.checkpoint.checkpoint_lookup import is_checkpoint
from hookline.checkpoint.checkpoint_manifest import InvalidCheckpointError, read_json
from hookline.files.limits import file_limits
from hookline.files.regular_files import open_regular_file
from hookline.printable import printable

log = logging.getLogger("hookline")

HOOKS_FOLDER = "hookline"
"""The folder within a host's checkpoint that has the state of the hooks."""

_COMPLETION_FILE = "hookline_complete.json"
_NAME = re.compile(r"checkpoint-(\d{1,18})")


def mark_complete(folder: Path) -> None:
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


def unmark(folder: Path, name: str = HOOKS_FOLDER) -> None:
    """Remove what `mark_complete` and the hooks have written: the host saves this one again."""
    (folder / _COMPLETION_FILE).unlink(missing_ok=True)
    if is_checkpoint(folder / name):
        shutil.rmtree(folder / name)


def describe_incomplete(folder: Path, *, verify: bool = True) -> str | None:
    """Return what is missing or damaged in a host's checkpoint; None if it is complete."""
    try:
        facts = read_json(folder / _COMPLETION_FILE, file_limits.manifest_bytes)
    except InvalidCheckpointError as error:
        return str(error)
    files = facts.get("files") if isinstance(facts, dict) else None
    if not isinstance(files, dict) or facts.get("version") != 1:
        return f"{_COMPLETION_FILE} is not valid"
    for name, expected in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or not isinstance(expected, dict):
            return f"{_COMPLETION_FILE} is not valid"
        if (problem := _describe_file(folder / name, expected, verify=verify)) is not None:
            return f"{printable(name)} {problem}"
    return None


def _describe_file(path: Path, expected: dict[str, Any], *, verify: bool) -> str | None:
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.get("size"):
                return f"has {size} bytes instead of {printable(expected.get('size'), 20)}"
            if verify and hash_stream(cast(BufferedIOBase, file)) != expected.get("xxh3"):
                return "is damaged: its hash is another"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def find_host_checkpoint(folder: Path, *, verify: bool = True) -> Path | None:
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
            "No checkpoint in %s is marked as complete: were they saved without Hookline? Check "
            "the newest one, %s, and resume from it by name.",
            folder,
            found[max(found)].name,
        )
    return None
