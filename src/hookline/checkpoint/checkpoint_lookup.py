"""Checkpoints on disk: their manifests, which ones are complete, what `last` and `best` name.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from hookline.checkpoint.atomic_files import hash_file, write_atomic
from hookline.errors import CheckpointError, listed

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "CheckpointScan",
    "complete_checkpoints",
    "damage_error",
    "find_checkpoint",
    "hash_manifest",
    "read_manifest",
    "read_pointers",
    "scan_checkpoints",
    "set_pointer",
]

log = logging.getLogger("hookline")

FORMAT = "hookline.checkpoint"
FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_POINTERS = ("last", "best")

Manifest = dict[str, Any]


class CheckpointScan(NamedTuple):
    """The checkpoints in a folder.

    Attributes:
        complete: The manifests of complete checkpoints by folder, oldest first.
        damage: What is wrong with the other folders, by name.
    """

    complete: dict[Path, Manifest]
    damage: dict[str, str]


class _InvalidCheckpointError(Exception):
    """A file of a checkpoint is missing, damaged, or written in an unknown format."""

    def __init__(self, name: str, problem: str, advice: str = "") -> None:
        super().__init__(f"{name} {problem}")
        self.advice = advice or "The checkpoint is damaged and was not loaded."

    def in_checkpoint(self, path: Path) -> CheckpointError:
        """Return the error for users, with the folder and the other checkpoints beside it."""
        return CheckpointError(f"{path}{os.sep}{self}. {self.advice}{_describe_others(path)}")


# -- manifests ------------------------------------------------------------------------------------


def read_manifest(path: Path, *, verify_files: bool = False) -> Manifest:
    """Return a checkpoint's manifest, after checking it against its own hash.

    Args:
        path: The checkpoint's folder.
        verify_files: Also compare the sizes and hashes of all files with the manifest.

    Raises:
        CheckpointError: The folder is not a checkpoint, or it is damaged. The message names the
            file and the complete checkpoints beside it.
    """
    if not (path / _MANIFEST).exists():
        problem = f"it has no {_MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} is not a checkpoint: {problem}.{_describe_others(path)}")
    try:
        manifest = _parse_manifest(path)
        if verify_files:
            _check_files(path, manifest, hashes=True)
    except _InvalidCheckpointError as error:
        raise error.in_checkpoint(path) from error.__cause__
    return manifest


def hash_manifest(manifest: Manifest) -> str:
    """Return the hash that a manifest has in its field `check`, which is not part of the hash."""
    return xxhash.xxh3_64(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def damage_error(path: Path, name: str, problem: str) -> CheckpointError:
    """Return the error for a damaged file of a checkpoint."""
    return _InvalidCheckpointError(name, problem).in_checkpoint(path)


def _parse_manifest(path: Path) -> Manifest:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
    except FileNotFoundError:
        raise _InvalidCheckpointError(_MANIFEST, "is missing") from None
    except (ValueError, OSError, RecursionError) as error:
        raise _InvalidCheckpointError(_MANIFEST, f"cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _InvalidCheckpointError(
            *(_MANIFEST, f"is not the manifest of a checkpoint: its 'format' is not '{FORMAT}'"),
            "Give the folder of a checkpoint.",
        )
    version = manifest.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise _InvalidCheckpointError(
            *(_MANIFEST, f"has format version {version}, and this hookline reads {FORMAT_VERSION}"),
            "Install a newer hookline: pip install -U hookline.",
        )
    if manifest.pop("check", None) != hash_manifest(manifest) or version != FORMAT_VERSION:
        raise _InvalidCheckpointError(_MANIFEST, "does not match its own hash")
    if not isinstance(manifest.get("files"), dict) or not {"created", "info"} <= manifest.keys():
        raise _InvalidCheckpointError(_MANIFEST, "has no 'created', 'files' or 'info'")
    return manifest


def _check_files(path: Path, manifest: Manifest, *, hashes: bool) -> None:
    for name, expected in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
            if size != expected["size"]:
                problem = f"has {size} bytes instead of {expected['size']}"
                raise _InvalidCheckpointError(name, problem)
            if hashes and hash_file(path / name) != expected["xxh3_64"]:
                raise _InvalidCheckpointError(name, "has changed since it was written (wrong hash)")
        except FileNotFoundError:
            raise _InvalidCheckpointError(name, "is missing") from None
        except OSError as error:
            raise _InvalidCheckpointError(name, f"cannot be read: {error}") from error


# -- which checkpoints are complete ---------------------------------------------------------------


def scan_checkpoints(folder: Path) -> CheckpointScan:
    """Return which checkpoints in a folder are complete, and what is wrong with the others.

    A checkpoint is complete if its manifest is valid and all files have their sizes. Hashes of
    files are verified when a checkpoint is loaded.
    """
    found: dict[Path, Manifest] = {}
    damage: dict[str, str] = {}
    # Names with a dot are unfinished. glob() of a folder that cannot be read returns nothing.
    for path in sorted(path for path in folder.glob("[!.]*") if path.is_dir()):
        try:
            manifest = _parse_manifest(path)
            _check_files(path, manifest, hashes=False)
            found[path] = manifest
        except _InvalidCheckpointError as error:
            damage[path.name] = str(error)
    by_age = sorted(found.items(), key=lambda item: (item[1]["created"], item[0].name))
    return CheckpointScan(dict(by_age), damage)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return list(scan_checkpoints(folder).complete)


def _describe_others(path: Path) -> str:
    names = [other.name for other in complete_checkpoints(path.parent) if other != path]
    if not names:
        return f" There is no other complete checkpoint in {path.parent}."
    newest = listed(reversed(names[-5:]))
    return f" Complete checkpoints in {path.parent}, newest first: {newest}."


def set_pointer(folder: Path, name: Literal["last", "best"], target: Path) -> None:
    """Make the file `last` or `best` in a folder name a checkpoint in that folder."""
    folder, target = Path(folder), Path(target)
    if name not in _POINTERS:
        raise CheckpointError(f"Unknown pointer {name!r}. Pointers are 'last' and 'best'.")
    if target.resolve().parent != folder.resolve():
        raise CheckpointError(f"'{name}' can only name a checkpoint in {folder}, not {target}.")
    read_manifest(target)
    try:
        write_atomic(folder / name, target.name + "\n")
    except OSError as error:
        raise CheckpointError(f"{folder / name} could not be written: {error}") from error


def read_pointers(folder: Path) -> dict[str, str]:
    """Return the names of the checkpoints that `last` and `best` name, where they exist."""
    names: dict[str, str] = {}
    for pointer in _POINTERS:
        try:
            text = (folder / pointer).read_bytes().decode(errors="replace")
        except OSError:
            continue
        names[pointer] = Path(text.strip()).name
    return names


def find_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> Path:
    """Return a checkpoint's folder.

    Args:
        path: A checkpoint's folder; the file `last` or `best`; or a run's folder or its folder
            `checkpoints/`. In these, `last` is followed; without it, or if the checkpoint that it
            names is not complete, the newest complete checkpoint is returned.
        verify: Also compare the hashes of all files; a damaged checkpoint is skipped with a
            warning.

    Raises:
        CheckpointError: There is none. The message says what was found.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. Give the folder of a checkpoint or of a run."
        )
    if path.is_file():
        return _follow_pointer(path)
    if (path / "model.safetensors").exists() or (path / "state.json").exists():
        read_manifest(path, verify_files=verify)  # raises if it is damaged
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    complete = [p for p in complete_checkpoints(folder) if not verify or _is_undamaged(p)]
    name = read_pointers(folder).get("last")
    if name is not None:
        if folder / name in complete:
            return folder / name
        log.warning(
            "%s names '%s', which is missing or damaged. Looking for the newest complete one.",
            folder / "last",
            name,
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


def _is_undamaged(path: Path) -> bool:
    try:
        read_manifest(path, verify_files=True)
    except CheckpointError as error:
        log.warning("%s", error)
        return False
    return True


def _follow_pointer(pointer: Path) -> Path:
    if pointer.name not in _POINTERS:
        raise CheckpointError(
            f"{pointer} is a file, and a checkpoint is a folder. Give the folder of a checkpoint "
            "or of a run, or the file 'last' or 'best' in checkpoints/."
        )
    name = read_pointers(pointer.parent).get(pointer.name, "")
    complete = complete_checkpoints(pointer.parent)
    if pointer.parent / name not in complete:
        raise CheckpointError(
            f"{pointer} names '{name}', which is missing or damaged. Complete checkpoints there: "
            f"{listed(p.name for p in complete)}."
        )
    return pointer.parent / name
