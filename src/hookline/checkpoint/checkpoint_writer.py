"""Writing one checkpoint into one or several folders, each of them complete or absent."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import xxhash

from hookline.checkpoint.atomic_files import (
    create_folder,
    remove_leftovers,
    sync,
    temporary_folder,
)
from hookline.checkpoint.checkpoint_lookup import (
    FORMAT,
    FORMAT_VERSION,
    hash_manifest,
    scan_checkpoints,
    set_pointer,
)
from hookline.checkpoint.state_tree import decode
from hookline.errors import CheckpointError

__all__ = [
    "AbandonedError",
    "CheckpointWriter",
    "SaveResult",
    "describe_failure",
    "encode_manifest",
]

log = logging.getLogger("hookline")

_CHUNK = 1 << 25
_LONGEST_PAUSE = 0.1  # seconds; a slow disk does not need pauses
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_ADVICE = {
    errno.ENOSPC: "Free space on the disk, or keep fewer checkpoints.",
    errno.EDQUOT: "Free space, or ask for a larger quota.",
    errno.EACCES: "Allow writing to the folder, or choose another one.",
    errno.EPERM: "Allow writing to the folder, or choose another one.",
    errno.EROFS: "The file system is read-only. Choose another folder.",
    errno.ENOENT: "The folder was removed during the save. Check what removed it.",
}


@dataclass(frozen=True)
class SaveResult:
    """What became of a request to save into one folder.

    Attributes:
        requested: The folder that was asked for.
        path: The checkpoint's folder, if it is complete. It has another name than the requested one
            if that existed.
        info: The manifest's `info`.
        error: What failed. With a `path`, the checkpoint is complete, and syncing its folder or
            moving `last` failed.
        replaced: It was abandoned for a newer save.
        seconds: From the request to the end of writing.
    """

    requested: Path
    path: Path | None
    info: Mapping[str, Any]
    error: CheckpointError | None
    replaced: bool
    seconds: float


class AbandonedError(Exception):
    """The write was abandoned for a newer save."""


class CheckpointWriter:
    """Writes the same files into one folder after another.

    The second folder gets hard links to the files of the first one. Where the file system does not
    support them, the files are written again.

    Args:
        files: The contents of the checkpoint's files except `manifest.json`.
        info: The manifest's `info`, encoded.
        begin: When the save was requested, by `time.perf_counter`.
        synced: Other files, which are flushed to the disk first.
        tree: What becomes `state.json`, if it is not one of the files: JSON that does not change.
    """

    def __init__(
        self,
        files: Mapping[str, memoryview],
        info: Any,
        begin: float,
        synced: Sequence[Path] = (),
        tree: Any = None,
    ) -> None:
        self.is_abandoned = False  # set by another thread
        self.is_urgent = True  # whether somebody waits; otherwise the write pauses between chunks
        self._files = dict(files)
        self._tree = tree
        self._info = info
        self._hashes: dict[str, str] = {}
        self._parts: dict[str, Any] = {}  # files of other ranks, with their sizes and hashes
        self._linkable: Path | None = None
        self._begin = begin
        self._synced = synced

    def link_to(self, path: Path, hashes: Mapping[str, str]) -> None:
        """Use the files of a complete checkpoint, which has the same contents with these hashes."""
        self._linkable = path
        self._hashes.update(hashes)

    def write(self, folder: Path, *, move_last: bool) -> SaveResult:
        """Write a checkpoint that is durable afterwards; errors are part of the result.

        Args:
            folder: Where to write it. If it exists, `<folder>_2`, `<folder>_3` … is written. Names
                that begin with a dot, and `last` and `best`, get an underscore in front.
            move_last: Make the file `last` beside it name the checkpoint.
        """
        path: Path | None = None
        error: CheckpointError | None = None
        replaced = False
        temporary: Path | None = None
        requested, folder = folder, _visible(folder)
        try:
            for file in self._synced:
                if file.exists() or folder.is_relative_to(file.parent):
                    sync(file)  # fails if a run was deleted: its folder is not created again
            create_folder(folder.parent)
            remove_leftovers(folder.parent)
            self._write_tree()
            self._check_space(folder.parent)
            with temporary_folder(folder.parent, folder.name) as temporary:
                self._write_files(temporary / folder.name)
                path = _rename(temporary / folder.name, folder)
            sync(folder.parent)
            self._linkable = path
            if move_last:
                set_pointer(folder.parent, "last", path)
        except AbandonedError:
            replaced = True
        except CheckpointError as failure:  # from `set_pointer`
            error = CheckpointError(f"The checkpoint {path} is complete, but: {failure}")
            error.__cause__ = failure
        except Exception as failure:
            error = CheckpointError(describe_failure(failure, folder, path, temporary))
            error.__cause__ = failure
        seconds = perf_counter() - self._begin
        return SaveResult(requested, path, decode(self._info, {}), error, replaced, seconds)

    def _write_tree(self) -> None:
        """Convert the tree to text, here and not while training waits for the save."""
        if self._tree is not None:
            text = json.dumps(self._tree, allow_nan=False).encode()
            self._files["state.json"] = memoryview(text)
            self._tree = None

    def _check_space(self, folder: Path) -> None:
        needed = 0 if self._linkable else sum(len(data) for data in self._files.values())
        total, _, free = shutil.disk_usage(folder)
        if total and free < needed:  # some network file systems report zeros
            raise OSError(
                errno.ENOSPC,
                f"{_megabytes(needed)} are needed, and {_megabytes(free)} are free on the disk",
            )

    def _write_files(self, folder: Path) -> None:
        folder.mkdir()
        for name, data in self._files.items():
            if not self._link(folder / name):
                self._hashes[name] = self._write_file(folder / name, data)
        self._add_files(folder)
        files = {
            name: {"size": len(data), "xxh3_64": self._hashes[name]}
            for name, data in self._files.items()
        }
        files |= self._parts
        manifest = encode_manifest(files, self._info, _next_number(folder.parent.parent))
        self._write_file(folder / "manifest.json", memoryview(manifest))
        sync(folder)

    def _add_files(self, folder: Path) -> None:
        """Add the files of other ranks; there are none."""

    def _copy_linkable(self, file: Path) -> None:
        assert self._linkable is not None
        shutil.copyfile(self._linkable / file.name, file)
        sync(file)

    def close(self) -> None:
        """Remove what is left of the write, once it has been reported."""

    def _link(self, file: Path) -> bool:
        if self._linkable is None:
            return False
        try:
            os.link(self._linkable / file.name, file)
        except (OSError, NotImplementedError):
            return False
        return True

    def _write_file(self, file: Path, data: memoryview) -> str:
        """Write and sync a file; return its hash."""
        digest = xxhash.xxh3_64()
        handle = os.open(file, _CREATE, 0o666)
        try:
            for start in range(0, len(data), _CHUNK):
                if self.is_abandoned and file.name in self._files:  # the manifest is the end
                    raise AbandonedError
                begin = perf_counter()
                chunk = data[start : start + _CHUNK]
                digest.update(chunk)
                while chunk:
                    chunk = chunk[os.write(handle, chunk) :]
                if not self.is_urgent and len(data) > _CHUNK:  # leave training the memory's speed
                    sleep(min(perf_counter() - begin, _LONGEST_PAUSE))
            os.fsync(handle)
        finally:
            os.close(handle)
        return digest.hexdigest()


def encode_manifest(files: Mapping[str, Any], info: Any, number: int) -> bytes:
    """Return the contents of `manifest.json`."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "number": number,
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "files": files,
        "info": info,
    }
    manifest["check"] = hash_manifest(manifest)
    return (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()


def _next_number(folder: Path) -> int:
    """Return one more than the highest number of the complete checkpoints in a folder."""
    numbers = (m.get("number", 0) for m in scan_checkpoints(folder).complete.values())
    return 1 + max(numbers, default=0)


def _visible(folder: Path) -> Path:
    """Return a folder that is not taken for an unfinished checkpoint or for a pointer."""
    name = folder.name
    if not name.startswith(".") and name not in ("last", "best"):
        return folder
    log.warning(
        "A checkpoint cannot be called '%s': such names are for unfinished checkpoints and for the "
        "files 'last' and 'best'. It is called '_%s'.",
        *(name, name),
    )
    return folder.with_name(f"_{name}")


def _rename(temporary: Path, folder: Path) -> Path:
    for number in count(1):
        final = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        if final.exists() or final.is_symlink():
            continue
        try:
            return temporary.rename(final)
        except OSError:
            if not final.exists():  # otherwise another process took the name
                raise
    raise AssertionError


def describe_failure(
    error: Exception, folder: Path, path: Path | None, temporary: Path | None
) -> str:
    """Return the message for a checkpoint that could not be written."""
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    file = getattr(error, "filename", None)
    text += f" ({file})" if file else ""
    code = getattr(error, "errno", None)
    advice = _ADVICE.get(code or 0, "Check that the folder is writable and the disk is not full.")
    if path is not None:
        return (
            f"The checkpoint {path} is complete, but syncing its folder failed: {text}. It may be "
            f"lost if the machine fails. {advice}"
        )
    left = (
        "No partial files were left."
        if _is_absent(temporary)
        else (f"Partial files are left in {temporary}; the next save there removes them.")
    )
    return f"The checkpoint {folder} could not be written: {text}. {left} {advice}"


def _is_absent(path: Path | None) -> bool:
    if path is None:
        return True
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
