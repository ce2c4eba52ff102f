"""Checkpoints on disk: their manifests, their files, which are complete, what `last` names.

A checkpoint may come from a stranger, who can also write a right hash into its manifest. So every
field has its type checked, names stay in the folder, links are not followed, and only regular
files are opened. Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import xxhash

from hookline.arguments import user_path
from hookline.checkpoint.atomic_files import write_atomic
from hookline.errors import CheckpointError, listed
from hookline.files import (
    MAX_STATE_DEPTH,
    count_hole_bytes,
    file_limits,
    is_plain_name,
    open_regular_file,
    parse_json,
    read_regular_file,
)

log = logging.getLogger("hookline")

FORMAT = "hookline.checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "state.safetensors", "state.json")
_BLOCK = 1 << 20  # bytes that are read at once
_MAX_FILES = 100
_INT64_LIMIT = 1 << 63
_SHARDS = re.compile(r"(?:model|state)-([1-9]\d{0,5})\.safetensors")
_HASH = re.compile(r"[0-9a-f]{16}")
_NOT_FINITE = re.compile(r"-?(nan|inf)|0x[0-9a-f]{16}")
_IN_NAMES = re.compile(r'[^/\\:*?"<>|\x00-\x1f]{1,255}')
_STATE_FILES = ("state.safetensors", "state.json")  # other folders can have a model.safetensors
_POINTERS = ("last", "best")
_POINTER_BYTES = 4096
_FOLDER = "checkpoints"
_ADVICE = "Give the folder of a checkpoint or of a run."

Manifest = dict[str, Any]


class InvalidCheckpointError(Exception):
    """A file of a checkpoint is missing, damaged, or written in an unknown format."""

    def __init__(self, name: str, problem: str, advice: str = "") -> None:
        super().__init__(f"{name} {problem[:500]}")
        self.advice = advice or "The checkpoint is damaged and was not loaded."

    def in_checkpoint(self, path: Path, others: str = "") -> CheckpointError:
        """Return the error for users, with the folder and a text about other checkpoints."""
        return CheckpointError(f"{path}{os.sep}{self}. {self.advice}{others}")


def is_checkpoint_name(name: Any) -> TypeGuard[str]:
    """Return whether a value is the name of a checkpoint's folder: without folders."""
    return (
        isinstance(name, str)
        and bool(_IN_NAMES.fullmatch(name))
        and not name.startswith(".")
        and name not in ("last", "best")
    )


def shard_files(manifest: Manifest, kind: str) -> list[str]:
    """Return the files with the shards of ranks other than 0, of "model" or "state"."""
    return [n for n in manifest["files"] if n.startswith(f"{kind}-") and _SHARDS.fullmatch(n)]


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to 2**63 - 1, and not a boolean."""
    return type(value) is int and 0 <= value < _INT64_LIMIT


def hash_manifest(manifest: Manifest) -> str:
    """Return the hash that a manifest has in its field `check`, which is not part of the hash."""
    return xxhash.xxh3_64(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


@contextmanager
def _reading(name: str) -> Generator[None]:
    """Turn an error of the file system into one that names the file of a checkpoint."""
    try:
        yield
    except FileNotFoundError:
        raise InvalidCheckpointError(name, "is missing") from None
    except OSError as error:
        raise InvalidCheckpointError(name, f"cannot be read: {error}") from error


def read_json(file: Path, max_bytes: int) -> Any:
    """Return the contents of a JSON file of a checkpoint; raise InvalidCheckpointError."""
    with _reading(file.name):
        data = read_regular_file(file, max_bytes)
    return parse_json_file(file.name, data)


def parse_json_file(name: str, data: bytes) -> Any:
    """Return the JSON in the data of a checkpoint's file; raise InvalidCheckpointError."""
    try:
        return parse_json(data, MAX_STATE_DEPTH)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpointError(name, f"cannot be read: {error}") from error


def parse_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in a folder, after checking all of its fields."""
    if path.is_symlink():
        raise InvalidCheckpointError(
            MANIFEST, "is not read: its folder is a symbolic link, which is not followed"
        )
    return check_manifest(read_json(path / MANIFEST, file_limits.manifest_bytes))


def check_manifest(manifest: Any) -> Manifest:
    """Return a manifest without its hash, after comparing that and checking all fields."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InvalidCheckpointError(
            *(MANIFEST, f"is not the manifest of a checkpoint: its 'format' is not '{FORMAT}'"),
            "Give the folder of a checkpoint.",
        )
    version = manifest.get("version")
    if type(version) is int and version > FORMAT_VERSION:
        raise InvalidCheckpointError(
            *(MANIFEST, f"has format version {version}, and this hookline reads {FORMAT_VERSION}"),
            "Install a newer hookline: pip install -U hookline.",
        )
    try:
        is_right = manifest.pop("check", None) == hash_manifest(manifest)
    except (ValueError, RecursionError):  # such as an integer with too many digits to write
        is_right = False
    if not is_right or type(version) is not int or version != FORMAT_VERSION:
        raise InvalidCheckpointError(MANIFEST, "does not match its own hash")
    if (problem := _find_problem(manifest)) is not None:
        raise InvalidCheckpointError(MANIFEST, problem)
    return manifest


def _find_problem(manifest: Manifest) -> str | None:
    """Return what is wrong with the fields of a manifest, if anything."""
    files, info = manifest.get("files"), manifest.get("info")
    if not (
        isinstance(files, dict)
        and isinstance(info, dict)
        and isinstance(manifest.get("created"), str)
        and is_count(manifest.get("number", 0))
    ):
        return "has no valid 'created', 'number', 'files' or 'info'"
    for name, facts in files.items():
        if not is_plain_name(name) or name == MANIFEST:
            return f"names the file {name!r}, which is not a plain file name"
        if not (
            isinstance(facts, dict)
            and is_count(facts.get("size"))
            and isinstance(facts.get("xxh3_64"), str)
            and _HASH.fullmatch(facts["xxh3_64"])
        ):
            return f"has no valid size or hash of {name}"
    others = [name for name in files if not _SHARDS.fullmatch(name)]  # not of other ranks than 0
    if len(others) > _MAX_FILES:
        return f"names {len(others)} files; expected at most {_MAX_FILES}"
    if missing := [name for name in FILES if name not in files]:
        return f"does not name {' and '.join(missing)}"
    metrics = info.get("metrics") or {}
    valid = {name: is_count(info.get(name) or 0) for name in ("step", "epoch", "tokens_seen")}
    valid |= {name: info.get(name) in (None, True, False) for name in ("emergency", "weights_only")}
    valid["run_id"] = info.get("run_id") is None or is_plain_name(info["run_id"])
    valid["metrics"] = isinstance(metrics, dict) and all(map(_is_metric, metrics.values()))
    return next((f"has no valid '{name}' in 'info'" for name, ok in valid.items() if not ok), None)


def _is_metric(value: Any) -> bool:
    """Return whether a value in `metrics` can be compared and shown, if it is a number."""
    if isinstance(value, dict) and value.get("$") == "float":  # NaN and infinities
        return isinstance(value.get("v"), str) and bool(_NOT_FINITE.fullmatch(value["v"]))
    return not isinstance(value, int) or abs(value) < _INT64_LIMIT


def check_files(path: Path, manifest: Manifest) -> None:
    """Compare the sizes of all files with the manifest, and limit what is not on the disk."""
    holes, limit = 0, file_limits.hole_bytes
    names: dict[tuple[int, int], str] = {}
    for name, expected in manifest["files"].items():
        with _reading(name), open_regular_file(path / name) as file:
            facts = os.fstat(file.fileno())
            size = facts.st_size
            holes += count_hole_bytes(file, limit)
        # Hashing one large file under many names would take for ever.
        other = names.setdefault((facts.st_dev, facts.st_ino), name)
        if other != name and facts.st_ino:
            raise InvalidCheckpointError(name, f"is the same file as {other}, by a hard link")
        if size != expected["size"]:
            problem = f"has {size} bytes instead of {expected['size']}"
            raise InvalidCheckpointError(name, problem)
        if holes > limit:
            problem = f"is sparse: more than {limit:,} of its {size:,} bytes are not on the disk"
            advice = "If this is intended, set hookline.file_limits.hole_bytes."
            raise InvalidCheckpointError(name, problem, advice)


def check_hashes(
    path: Path,
    manifest: Manifest,
    on_progress: Callable[[int], object] = int,
    ranks: tuple[int, int] = (0, 1),
) -> None:
    """Compare the hashes of files with the manifest.

    `on_progress` is called with the number of bytes that were read. `ranks` is the rank
    and the number of processes that compare together, each its own files.
    """
    rank, size = ranks
    for name, expected in manifest["files"].items():
        shards = _SHARDS.fullmatch(name)
        if (int(shards[1]) if shards else 0) % size != rank:
            continue
        hashed = xxhash.xxh3_64()
        with _reading(name), open_regular_file(path / name) as file:
            while block := file.read(_BLOCK):
                hashed.update(block)
                on_progress(len(block))
        if hashed.hexdigest() != expected["xxh3_64"]:
            raise InvalidCheckpointError(name, "has changed since it was written (wrong hash)")


# -- checkpoints in a folder ----------------------------------------------------------------------


class CheckpointScan(NamedTuple):
    """Complete checkpoints with their manifests, oldest first, and what is wrong with others."""

    complete: dict[Path, Manifest]
    damage: dict[str, str]


def read_manifest(
    path: Path, *, verify_files: bool = False, ranks: tuple[int, int] = (0, 1)
) -> Manifest:
    """Return a checkpoint's manifest, after checking it against its own hash.

    Args:
        path: The checkpoint's folder.
        verify_files: Also compare the sizes and hashes of all files with the manifest.
        ranks: The rank and the number of processes, if these compare the hashes together.

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
            check_hashes(path, manifest, ranks=ranks)
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


@contextmanager
def naming_damage(path: Path, name: str) -> Generator[None]:
    """Turn whatever is raised while a file of a checkpoint is read into an error that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except InvalidCheckpointError as error:
        raise error.in_checkpoint(path) from error
    except Exception as error:  # a file with the right hash may still have the wrong content
        invalid = InvalidCheckpointError(name, f"cannot be read: {type(error).__name__}: {error}")
        raise invalid.in_checkpoint(path, _describe_others(path)) from error


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
    if "://" in os.fspath(path):
        raise CheckpointError(f"{path} is a URL. Copy the checkpoint into a folder, and give that.")
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
    scan = scan_checkpoints(folder)
    found = _choose_newest(folder, scan, verify, weights_suffice)
    if found is not None:
        return found
    kinds = {path.name: _describe_kind(manifest) for path, manifest in scan.complete.items()}
    others = [f"{name} ({why})" for name, why in kinds.items() if why]
    advice = f"To use one of these, give its folder: {', '.join(others)}." if others else _ADVICE
    raise CheckpointError(
        f"No complete checkpoint{' to resume from' if others else ''} in {folder}. Found there: "
        f"{listed(sorted(p.name for p in folder.iterdir())[:10])}. {advice}"
    )


def _describe_kind(manifest: Manifest) -> str:
    """Return why no run resumes from a complete checkpoint automatically."""
    if is_emergency(manifest):
        return "saved after a crash"
    return "only weights, from which no run resumes" if is_weights_only(manifest) else ""


def path_exists(path: Path) -> bool:
    """Return whether a file or folder exists; raise if that cannot be known."""
    try:
        return path.exists()
    except OSError as error:  # no permission, or the name is too long
        raise CheckpointError(f"{path} cannot be read ({error.strerror}). {_ADVICE}") from error


def _choose_newest(
    folder: Path, scan: CheckpointScan, verify: bool, weights_suffice: bool
) -> Path | None:
    """Return the newest complete checkpoint, or None; a warning names the damaged ones."""
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
    complete = [path.name for path in complete_checkpoints(pointer.parent)]
    if name not in complete:
        problem = f"names '{name}', which is missing or damaged" if name else "names no checkpoint"
        raise CheckpointError(
            f"{pointer} {problem}. Complete checkpoints there: {listed(complete)}."
        )
    return pointer.parent / name
