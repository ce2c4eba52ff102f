"""Finding checkpoints: the folder itself, what `last` and `best` name, or the newest."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

from hookline.checkpoint.atomic_files import write_atomic
from hookline.checkpoint.checkpoint_folder import complete_checkpoints, read_manifest
from hookline.errors import CheckpointError, listed

__all__ = ["find_checkpoint", "point"]

log = logging.getLogger("hookline")

_POINTERS = ("last", "best")


def point(folder: Path, name: Literal["last", "best"], target: Path) -> None:
    """Let `last` or `best` name a checkpoint: a small file, replaced atomically.

    Args:
        folder: The folder `checkpoints/`.
        name: `"last"` or `"best"`.
        target: A checkpoint in that folder.
    """
    folder, target = Path(folder), Path(target)
    if name not in _POINTERS:
        raise CheckpointError(f"A pointer is called 'last' or 'best', not {name!r}.")
    if target.resolve().parent != folder.resolve():
        raise CheckpointError(f"'{name}' can only name a checkpoint in {folder}, not {target}.")
    read_manifest(target)
    try:
        write_atomic(folder / name, target.name + "\n")
    except OSError as error:
        raise CheckpointError(f"{folder / name} could not be written: {error}") from error


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return a checkpoint's folder.

    Args:
        path: A checkpoint's folder; a run's folder, or its folder `checkpoints/`: then what `last`
            names, else the newest complete one; or the file `last` or `best` itself.

    Raises:
        CheckpointError: There is none. The message says what was found.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Give a checkpoint's or a run's folder.")
    if path.is_file():
        return _from_pointer_itself(path)
    if (path / "model.safetensors").exists() or (path / "state.json").exists():
        read_manifest(path)  # complete, or an error that says what is missing
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    complete = complete_checkpoints(folder)
    if (folder / "last").is_file():
        named = _follow(folder / "last")
        if named in complete:
            return named
        log.warning(
            "%s names '%s', which is missing or damaged; looking for the newest complete one.",
            folder / "last",
            named.name,
        )
    if complete:
        return complete[-1]
    try:  # a checkpoint that has lost everything but its manifest
        read_manifest(folder)
    except CheckpointError:
        found = listed(sorted(p.name for p in folder.iterdir())[:10])
        raise CheckpointError(
            f"No complete checkpoint in {folder}. Found there: {found}. "
            "Give the folder of a run or of a checkpoint."
        ) from None
    return folder


def _from_pointer_itself(path: Path) -> Path:
    if path.name not in _POINTERS:
        raise CheckpointError(
            f"{path} is a file. A checkpoint is a folder; give that, its run's folder, or the file "
            "'last' or 'best' in checkpoints/."
        )
    named = _follow(path)
    if named not in complete_checkpoints(path.parent):
        raise CheckpointError(
            f"{path} names '{named.name}', which is missing or damaged. Complete ones there: "
            f"{listed(p.name for p in complete_checkpoints(path.parent))}."
        )
    return named


def _follow(pointer: Path) -> Path:
    name = pointer.read_bytes().decode(errors="replace").strip()
    return pointer.parent / (Path(name).name or "nothing")
