"""Checkpoints on disk: their manifests, which ones are complete, what `last` and `best` name.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from hookline.arguments import user_path
from hookline.checkpoint.atomic_files import write_atomic
from hookline.checkpoint.checkpoint_manifest import (
    FORMAT,
    MANIFEST,
    InvalidCheckpointError,
    Manifest,
    check_files,
    check_hashes,
    is_checkpoint_name,
    parse_manifest,
    read_json,
)
from hookline.errors import CheckpointError, listed
from hookline.files.limits import file_limits
from hookline.files.regular_files import read_regular_file

log = logging.getLogger("hookline")

_STATE_FILES = ("state.safetensors", "state.json")  # other folders can have a model.safetensors
_POINTERS = ("last", "best")
_POINTER_BYTES = 4096
_FOLDER = "checkpoints"
_ADVICE = "Give the folder of a checkpoint or of a run."


class CheckpointScan(NamedTuple):
    """Complete checkpoints with their manifests, oldest first, and what is wrong with others."""

    complete: dict[Path, Manifest]
    damage: dict[str, str]


# -- manifests ------------------------------------------------------------------------------------


def read_manifest(
    path: Path, *, verify_files: bool = False, share: tuple[int, int] = (0, 1)
) -> Manifest:
    """Return a checkpoint's manifest, after checking it against its own hash.

    Args:
        path: The checkpoint's folder.
        verify_files: Also compare the sizes and hashes of all files with the manifest.
        share: The rank and the number of processes, if these compare the hashes together.

    Raises:
        CheckpointError: The folder is not a checkpoint, or it is damaged. The message names the
            file and the complete checkpoints beside it.
    """
    if not (path / MANIFEST).exists():
        problem = f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} is not a checkpoint: {problem}.{_describe_others(path)}")
    try:
        manifest = parse_manifest(path)
        if verify_files:
            check_files(path, manifest)
            check_hashes(path, manifest, share=share)
    except InvalidCheckpointError as error:
        raise error.in_checkpoint(path, _describe_others(path)) from error
    return manifest


def verify_checkpoint(path: Path, on_progress: Callable[[int], object] = int) -> str | None:
    """Return what is damaged in a checkpoint, with the file's name; None if nothing is."""
    try:
        manifest = parse_manifest(path)
        check_files(path, manifest)
        check_hashes(path, manifest, on_progress)
    except InvalidCheckpointError as error:
        return str(error)
    return None


def is_emergency(manifest: Manifest) -> bool:
    """Return whether a checkpoint was saved after a crash. It is never chosen automatically."""
    return bool(manifest["info"].get("emergency"))


def is_weights_only(manifest: Manifest) -> bool:
    """Return whether a checkpoint has only the model's weights, so that no run resumes from it."""
    return bool(manifest["info"].get("weights_only"))


def damage_error(path: Path, name: str, problem: str) -> CheckpointError:
    """Return the error for a damaged file of a checkpoint."""
    return InvalidCheckpointError(name, problem).in_checkpoint(path, _describe_others(path))


# -- which checkpoints are complete ---------------------------------------------------------------


def scan_checkpoints(folder: Path) -> CheckpointScan:
    """Return which checkpoints in a folder have a valid manifest and files of the right sizes."""
    found: dict[Path, Manifest] = {}
    damage: dict[str, str] = {}
    if folder.name == _FOLDER and folder.is_symlink():
        return CheckpointScan({}, {".": "is a symbolic link, which is not followed"})
    # Names with a dot are unfinished. glob() of a folder that cannot be read returns nothing.
    for path in folder.glob("[!.]*"):
        if not is_checkpoint(path):
            continue
        try:
            manifest = parse_manifest(path)
            check_files(path, manifest)
            found[path] = manifest
        except InvalidCheckpointError as error:
            if path.is_dir():  # otherwise it was removed meanwhile
                damage[path.name] = str(error)
    by_age = sorted(found.items(), key=lambda item: age_key(item[0].name, item[1]))
    return CheckpointScan(dict(by_age), dict(sorted(damage.items())))


def age_key(name: str, manifest: Manifest) -> tuple[int, str, str]:
    """Return what orders checkpoints by age: numbers first, because clocks can be set back."""
    return manifest.get("number", 0), manifest["created"], name


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, complete or damaged, and not a run's folder."""
    if (path / _FOLDER).is_dir():
        return False
    try:
        if any(os.path.lexists(path / name) for name in _STATE_FILES):
            return True
        manifest = read_json(path / MANIFEST, file_limits.manifest_bytes)
    except PermissionError:
        return path.is_dir()
    except InvalidCheckpointError as error:
        return isinstance(error.__cause__, PermissionError) and path.is_dir()
    except (OSError, ValueError):  # ValueError: it is not a valid name of a file
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return list(scan_checkpoints(folder).complete)


def _describe_others(path: Path) -> str:
    complete = scan_checkpoints(path.parent).complete
    names = [p.name for p, found in complete.items() if p != path and not is_emergency(found)]
    if not names:
        return f" There is no other complete checkpoint in {path.parent}."
    newest = listed(reversed(names[-5:]))
    return f" Complete checkpoints in {path.parent}, newest first: {newest}."


def set_pointer(folder: Path, name: Literal["last", "best"], target: Path) -> None:
    """Make the file `last` or `best` in a folder name a checkpoint in that folder."""
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
            text = read_regular_file(folder / pointer, _POINTER_BYTES).decode(errors="replace")
        except OSError:
            continue
        name = text.removesuffix("\n")  # it may end with a space
        if is_checkpoint_name(name):
            names[pointer] = name
    return names


def find_checkpoint(
    path: str | os.PathLike[str], *, verify: bool = False, weights_suffice: bool = False
) -> Path:
    """Return a checkpoint's folder.

    Args:
        path: A checkpoint's folder; the file `last` or `best`; or a run's folder or its folder
            `checkpoints/`, which stand for the newest complete checkpoint in them. Checkpoints
            that were saved after a crash are found only by their own folder.
        verify: Also compare the hashes of all files. In a folder with several checkpoints, a
            damaged one is skipped with a warning that names the file.
        weights_suffice: In a folder with several checkpoints, one that has only the model's weights
            may be the newest. Otherwise it is one that a run can resume from.
    """
    path = user_path(path)
    if not path_exists(path):
        raise CheckpointError(f"{path} does not exist. {_ADVICE}")
    if path.is_symlink() and path.parent.name != _FOLDER:
        path = path.resolve()  # a link that was given is followed, none that a run contains
    if path.is_file():
        path = _follow_pointer(path)
    if is_checkpoint(path):
        read_manifest(path, verify_files=verify)  # raises if the manifest is missing or damaged
        return path
    folder = path / _FOLDER if (path / _FOLDER).is_dir() else path
    if folder is not path and folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a symbolic link, which is not followed. To use the checkpoints there, "
            f"give {folder.resolve()}."
        )
    found = find_newest_checkpoint(folder, verify=verify, weights_suffice=weights_suffice)
    if found is not None:
        return found
    complete = scan_checkpoints(folder).complete.items()
    emergency = [path.name for path, manifest in complete if is_emergency(manifest)]
    weights = [path.name for path, manifest in complete if is_weights_only(manifest)]
    advice = _ADVICE
    if emergency:
        advice = f"To use one that was saved after a crash, give its folder: {listed(emergency)}."
    elif weights:
        advice = f"These have only the weights, and no run resumes from them: {listed(weights)}."
    raise CheckpointError(
        f"No complete checkpoint{' to resume from' if weights else ''} in {folder}. Found there: "
        f"{listed(sorted(p.name for p in folder.iterdir())[:10])}. {advice}"
    )


def path_exists(path: Path) -> bool:
    """Return whether a file or folder exists; raise if that cannot be known."""
    try:
        return path.exists()
    except OSError as error:  # no permission, or the name is too long
        raise CheckpointError(f"{path} cannot be read ({error.strerror}). {_ADVICE}") from error


def find_newest_checkpoint(
    folder: Path, *, verify: bool = False, weights_suffice: bool = False
) -> Path | None:
    """Return the newest complete checkpoint in a folder of checkpoints, or None.

    Checkpoints that were saved after a crash are not considered. A warning names the damaged ones.

    Args:
        folder: The folder `checkpoints/` of a run, or another folder of checkpoints.
        verify: Also compare the hashes of all files, beginning with the newest checkpoint.
        weights_suffice: Whether one that has only the model's weights is considered.
    """
    scan = scan_checkpoints(folder)
    damage = [f"{folder / name}{os.sep}{problem}" for name, problem in scan.damage.items()]
    name = read_pointers(folder).get("last")
    if name is not None and folder / name not in scan.complete and name not in scan.damage:
        damage.append(f"{folder / 'last'} names '{name}', which is missing")
    newest: Path | None = None
    for path, manifest in reversed(scan.complete.items()):
        if is_emergency(manifest) or (is_weights_only(manifest) and not weights_suffice):
            continue
        problem = verify_checkpoint(path) if verify else None
        if problem is None:
            newest = path
            break
        damage.append(f"{path}{os.sep}{problem}")
    if damage:
        used = "There is no complete one" if newest is None else f"Using {newest}"
        log.warning("Damaged checkpoints are skipped: %s. %s.", "; ".join(damage), used)
    return newest


def _follow_pointer(pointer: Path) -> Path:
    if pointer.name not in _POINTERS:
        raise CheckpointError(
            f"{pointer} is a file, and a checkpoint is a folder. Give the folder of a checkpoint "
            "or of a run, or the file 'last' or 'best' in checkpoints/."
        )
    name = read_pointers(pointer.parent).get(pointer.name)
    complete = complete_checkpoints(pointer.parent)
    if name is None or pointer.parent / name not in complete:
        problem = f"names '{name}', which is missing or damaged"
        raise CheckpointError(
            f"{pointer} {problem if name is not None else 'names no checkpoint'}. Complete "
            f"checkpoints there: {listed(p.name for p in complete)}."
        )
    return pointer.parent / name
