"""A checkpoint's manifest and the files that it names, read with the checks of files from anybody.

A checkpoint may come from a stranger, who can also write a right hash into its manifest. So every
field has its type checked, names stay in the folder, links are not followed, and only regular
files are opened. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import xxhash

from hookline.errors import CheckpointError
from hookline.files.limits import file_limits
from hookline.files.plain_names import is_plain_name
from hookline.files.regular_files import count_hole_bytes, open_regular_file, read_regular_file
from hookline.files.strict_json import MAX_STATE_DEPTH, parse_json
from hookline.printable import printable

FORMAT = "hookline.checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "state.safetensors", "state.json")
_BLOCK = 1 << 20  # bytes that are read at once
_MAX_FILES = 100
_INT64_LIMIT = 1 << 63
_PART = re.compile(r"(?:model|state)-([1-9]\d{0,5})\.safetensors")
_HASH = re.compile(r"[0-9a-f]{16}")
_NOT_FINITE = re.compile(r"-?(nan|inf)|0x[0-9a-f]{16}")
_IN_NAMES = re.compile(r'[^/\\:*?"<>|\x00-\x1f]{1,255}')

Manifest = dict[str, Any]


class InvalidCheckpointError(Exception):
    """A file of a checkpoint is missing, damaged, or written in an unknown format."""

    def __init__(self, name: str, problem: str, advice: str = "") -> None:
        super().__init__(f"{name} {printable(problem, 500)}")
        self.advice = advice or "The checkpoint is damaged and was not loaded."

    def in_checkpoint(self, path: Path, others: str = "") -> CheckpointError:
        """Return the error for users, with the folder and a text about other checkpoints."""
        return CheckpointError(f"{path}{os.sep}{self}. {self.advice}{others}")


def is_checkpoint_name(name: Any) -> TypeGuard[str]:
    """Return whether a value is the name of a checkpoint's folder: one part of a path."""
    return (
        isinstance(name, str)
        and bool(_IN_NAMES.fullmatch(name))
        and not name.startswith(".")
        and name not in ("last", "best")
    )


def part_names(manifest: Manifest, kind: str) -> list[str]:
    """Return the names of the files with the parts of ranks other than 0, of "model" or "state"."""
    return [n for n in manifest["files"] if n.startswith(f"{kind}-") and _PART.fullmatch(n)]


def _rank_of(name: str) -> int:
    """Return the rank that has written a file."""
    found = _PART.fullmatch(name)
    return 0 if found is None else int(found[1])


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
    problem = _describe_files(manifest.get("files")) or _describe_fields(manifest)
    if problem is not None:
        raise InvalidCheckpointError(MANIFEST, problem)
    return manifest


def _describe_files(files: Any) -> str | None:
    """Return what is wrong with the field `files`, if anything."""
    if not isinstance(files, dict):
        return "has no valid 'created', 'files' or 'info': 'files' is not a mapping"
    for name, facts in files.items():
        if not is_plain_name(name) or name == MANIFEST:
            return f"names the file {name!r}, which is not a plain file name"
        if not (
            isinstance(facts, dict)
            and is_count(facts.get("size"))
            and isinstance(facts.get("xxh3_64"), str)
            and _HASH.fullmatch(facts["xxh3_64"])
        ):
            return f"has no valid 'created', 'files' or 'info': no size or hash of {name}"
    others = [name for name in files if not _PART.fullmatch(name)]  # not of other ranks than 0
    if len(others) > _MAX_FILES:
        return f"names {len(others)} files; expected at most {_MAX_FILES}"
    missing = [name for name in FILES if name not in files]
    return f"does not name {' and '.join(missing)}" if missing else None


def _describe_fields(manifest: Manifest) -> str | None:
    """Return which other field is not valid, if any."""
    info = manifest.get("info")
    if not isinstance(info, dict) or not isinstance(manifest.get("created"), str):
        return "has no valid 'created', 'files' or 'info'"
    if not is_count(manifest.get("number", 0)):
        return "has no valid 'number'"
    run_id, metrics = info.get("run_id"), info.get("metrics")
    valid = {
        "step": info.get("step") is None or is_count(info["step"]),
        "epoch": info.get("epoch") is None or is_count(info["epoch"]),
        "tokens_seen": info.get("tokens_seen") is None or is_count(info["tokens_seen"]),
        "run_id": run_id is None or is_plain_name(run_id),
        "metrics": metrics is None
        or (isinstance(metrics, dict) and all(map(_is_metric, metrics.values()))),
        "emergency": info.get("emergency") in (None, True, False),
        "weights_only": info.get("weights_only") in (None, True, False),
    }
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
    share: tuple[int, int] = (0, 1),
) -> None:
    """Compare the hashes of files with the manifest.

    `on_progress` is called with the number of bytes that were read. `share` is the rank
    and the number of processes that compare together, each its own files.
    """
    rank, size = share
    for name, expected in manifest["files"].items():
        if _rank_of(name) % size != rank:
            continue
        hashed = xxhash.xxh3_64()
        with _reading(name), open_regular_file(path / name) as file:
            while block := file.read(_BLOCK):
                hashed.update(block)
                on_progress(len(block))
        if hashed.hexdigest() != expected["xxh3_64"]:
            raise InvalidCheckpointError(name, "has changed since it was written (wrong hash)")
