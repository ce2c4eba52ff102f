"""Writing one checkpoint into one or several folders, each of them complete or absent.

Several ranks write a checkpoint of sharded tensors together. A rank other than 0 writes its files
into a temporary folder beside the checkpoint, and a note when they are complete. Rank 0 waits for
the notes, moves the files into its own temporary folder, and writes the manifest. The ranks share
nothing but the file system, and a token that is part of the folders' names.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import xxhash

from hookline.checkpoint.atomic_files import (
    TEMPORARY,
    create_folder,
    create_locked_folder,
    move_to_free_name,
    remove_leftovers,
    remove_locked_folder,
    sync,
    temporary_folder,
)
from hookline.checkpoint.catalog import (
    FORMAT,
    FORMAT_VERSION,
    hash_manifest,
    scan_checkpoints,
    set_pointer,
)
from hookline.checkpoint.state_tree import decode
from hookline.errors import CheckpointError

log = logging.getLogger("hookline")

_CHUNK = 1 << 25
_LONGEST_PAUSE = 0.1  # seconds; a slow disk does not need pauses
_NOTE = "shard.json"  # of a rank other than 0
_ABANDONED = "abandoned"
_LONGEST_WAIT = 600.0  # seconds, for the other ranks
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
    """The result of a request to save into one folder.

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


@dataclass(frozen=True)
class SharedSave:
    """A save of several processes, with a token that no other save has."""

    token: str
    rank: int
    size: int

    def folder_name(self, rank: int) -> str:
        """Return what the name of a rank's temporary folder contains."""
        return f"{self.token}-rank{rank}"


class SharedSaves:
    """Gives every save of several processes a token that all of them know without a message."""

    def __init__(self, token: str, rank: int, size: int) -> None:
        self._token, self._rank, self._size = token, rank, size
        self._saves = 0

    def next(self) -> SharedSave:
        """Return the next save; all processes have to call this for each of them."""
        self._saves += 1
        return SharedSave(f"{self._token}-{self._saves}", self._rank, self._size)


class _AbandonedError(Exception):
    """The write was abandoned for a newer save."""


class CheckpointWriter:
    """Writes the same files into one folder after another; later ones get hard links."""

    def __init__(
        self,
        files: Mapping[str, memoryview],
        info: Any,
        begin: float,
        synced: Sequence[Path] = (),
        tree: Any = None,
        shared: SharedSave | None = None,
    ) -> None:
        self.is_abandoned = False  # set by another thread
        self.is_urgent = True  # whether somebody waits; otherwise the write pauses between chunks
        self._files = dict(files)
        self._tree = tree
        self._info = info
        self._hashes: dict[str, str] = {}
        self._others: dict[str, Any] = {}  # sizes and hashes of files that are not in memory
        self._linkable: Path | None = None
        self._begin = begin
        self._synced = synced
        self._shared = shared
        self._path: Path | None = None  # of the checkpoint that was written last

    def use_files_of(self, path: Path, files: Mapping[str, Any]) -> None:
        """Write links to the files of a complete checkpoint, or copies, with these hashes."""
        self._linkable = path
        self._others.update(files)

    def write(self, folder: Path, *, move_last: bool) -> SaveResult:
        """Write a checkpoint that is durable afterwards; errors are part of the result."""
        self._path = None
        error: CheckpointError | None = None
        replaced = False
        try:
            self._write(_visible(folder), move_last)
        except _AbandonedError:
            replaced = True
        except Exception as failure:
            error = CheckpointError(_describe_failure(failure, folder, self._path))
            error.__cause__ = failure
        seconds = perf_counter() - self._begin
        return SaveResult(folder, self._path, decode(self._info, {}), error, replaced, seconds)

    def _write(self, folder: Path, move_last: bool) -> None:
        for file in self._synced:
            if file.exists() or folder.is_relative_to(file.parent):
                sync(file)  # fails if a run was deleted: its folder is not created again
        create_folder(folder.parent)
        remove_leftovers(folder.parent)
        if self._tree is not None:  # converted here, and not while training waits for the save
            text = json.dumps(self._tree, allow_nan=False).encode()
            self._files["state.json"], self._tree = memoryview(text), None
        self._check_space(folder.parent)
        with temporary_folder(folder.parent, folder.name) as temporary:
            self._write_files(temporary / folder.name)
            self._path = move_to_free_name(temporary / folder.name, folder)
        sync(folder.parent)
        self._linkable = self._path
        if move_last:
            set_pointer(folder.parent, "last", self._path)

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
        if self._others and self._linkable is not None:  # of another folder
            for name in self._others:
                if not self._link(folder / name):
                    shutil.copyfile(self._linkable / name, folder / name)
                    sync(folder / name)
        elif self._shared is not None:
            self._take_shards(folder, self._shared)
        files = {
            name: {"size": len(data), "xxh3_64": self._hashes[name]}
            for name, data in self._files.items()
        }
        files |= self._others
        others = scan_checkpoints(folder.parent.parent).complete.values()
        number = 1 + max((other.get("number", 0) for other in others), default=0)
        manifest = _encode_manifest(files, self._info, number)
        self._write_file(folder / "manifest.json", memoryview(manifest))
        sync(folder)

    def _take_shards(self, folder: Path, shared: SharedSave) -> None:
        """Move the files of the other ranks into the folder, once these have written them."""
        for rank in range(1, shared.size):
            theirs = self._wait_for_note(folder.parent.parent, shared.folder_name(rank), rank)
            note = json.loads((theirs / _NOTE).read_bytes())
            if note.get("error") == _ABANDONED:
                raise _AbandonedError
            if "error" in note:
                raise OSError(note["error"])
            for name, facts in note["files"].items():
                (theirs / name).rename(folder / name)
                self._others[name] = facts

    def _wait_for_note(self, parent: Path, name: str, rank: int) -> Path:
        end = monotonic() + _LONGEST_WAIT
        while monotonic() < end:
            if self.is_abandoned:
                raise _AbandonedError
            for note in parent.glob(f"{TEMPORARY}{name}-*.hookline/{_NOTE}"):
                return note.parent
            sleep(0.02)
        raise OSError(f"rank {rank} has not written its shards within {_LONGEST_WAIT:.0f} s")

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
                    raise _AbandonedError
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


class ShardWriter(CheckpointWriter):
    """Writes the files of a rank other than 0 for the checkpoint `requested`."""

    requested: Path
    _folder: Path | None = None
    _lock: Any = None

    def _write(self, folder: Path, move_last: bool) -> None:
        """Write this rank's files for the checkpoint in a folder; rank 0 makes it complete."""
        assert self._shared is not None
        create_folder(folder.parent)
        name = self._shared.folder_name(self._shared.rank)
        self._folder, self._lock = create_locked_folder(folder.parent, name)
        note: dict[str, Any] = {"files": {}}
        try:
            for file, data in self._files.items():
                digest = self._write_file(self._folder / file, data)
                note["files"][file] = {"size": len(data), "xxh3_64": digest}
        except _AbandonedError:
            note = {"error": _ABANDONED}
        except OSError as failure:
            note = {"error": f"rank {self._shared.rank}: {failure}"}
        self._write_file(self._folder / f".{_NOTE}", memoryview(json.dumps(note).encode()))
        (self._folder / f".{_NOTE}").rename(self._folder / _NOTE)
        if note.get("error") == _ABANDONED:
            raise _AbandonedError

    def close(self) -> None:
        """Remove the temporary folder, once rank 0 has finished."""
        if self._folder is not None:
            remove_locked_folder(self._folder, self._lock)
            self._folder = self._lock = None


def _encode_manifest(files: Mapping[str, Any], info: Any, number: int) -> bytes:
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


def _describe_failure(error: Exception, folder: Path, path: Path | None) -> str:
    """Return the message for a checkpoint that could not be written, or not all around it."""
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    file = getattr(error, "filename", None)
    text += f" ({file})" if file else ""
    code = getattr(error, "errno", None)
    advice = _ADVICE.get(code or 0, "Check that the folder is writable and the disk is not full.")
    if path is not None:
        return (
            f"The checkpoint {path} is complete, but syncing its folder or writing 'last' failed: "
            f"{text}. It may be lost if the machine fails. {advice}"
        )
    return f"The checkpoint {folder} could not be written: {text}. {advice}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
