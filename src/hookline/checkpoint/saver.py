"""CheckpointSaver: copies a state on the calling thread, and writes it on another one.

    CheckpointSaver.save      copy the state
    _Write                    the thread that writes it
    CheckpointWriter.write    the files of one folder after another, each complete or absent

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
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import xxhash
from torch import Tensor

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
from hookline.checkpoint.snapshot import SnapshotBuffers, decode, encode_info, encode_state
from hookline.errors import CheckpointError

log = logging.getLogger("hookline")

_START_SECONDS = 1.0  # for a thread whose start was interrupted by a signal
_NICENESS = 10  # with 19, a write beside training on all cores took a minute
_LOWEST_PRIORITY = 19
_CHUNK = 1 << 25
_LONGEST_PAUSE = 0.1  # seconds; a slow disk does not need pauses
_NOTE = "shard.json"  # of a rank other than 0
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
        seconds: From the request to the end of writing.
    """

    requested: Path
    path: Path | None
    info: Mapping[str, Any]
    error: CheckpointError | None
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


# -- copying a state, and writing it on another thread ---------------------------------------------


class CheckpointSaver:
    """Copies a state on the calling thread, and writes it as a checkpoint on another thread.

    At most one save is being written, and the next one waits for it. A process that ends normally
    finishes it first.

    Args:
        background: Write on another thread; otherwise before `save` returns.

    Example:
        ```python
        saver = CheckpointSaver()
        saver.save([Path("checkpoints/step_000120")], model=model.state_dict(), state={}, info={})
        ...  # training goes on, and may change the weights
        saver.wait()
        for result in saver.finished():
            print(result.path or result.error)
        ```
    """

    def __init__(self, *, background: bool = True) -> None:
        import_module("filelock")  # not on the writing thread: a fork during it could deadlock
        self._background = background
        self._buffers = SnapshotBuffers()
        self._write: _Write | None = None
        self._results: deque[SaveResult] = deque()
        self._shards: list[ShardWriter] = []  # of a rank other than 0, until rank 0 has them

    def prepare(
        self, *, model: Mapping[str, Tensor], state: Mapping[str, Any], shards_only: bool = False
    ) -> None:
        """Allocate the memory for copies of this state, so that the first save is fast too."""
        encoded = encode_state(model, state)
        encoded = encoded.shards_only() if shards_only else encoded
        self.wait()
        self._buffers.reserve(encoded)

    def save(
        self,
        folders: Sequence[Path],
        *,
        model: Mapping[str, Tensor],
        state: Mapping[str, Any],
        info: Mapping[str, Any],
        sync: Sequence[Path] = (),
        shared: SharedSave | None = None,
    ) -> None:
        """Copy a state now, and write it into each of the folders later.

        The first folder that can be written gets the bytes; the others get hard links to them where
        the file system supports these. `finished` returns a result for each folder. In each
        folder's parent, `last` names the checkpoint afterwards, unless `info["emergency"]` or
        `info["weights_only"]` is true.

        Args:
            folders: Such as `checkpoints/step_000120`. An existing folder is never changed: the
                checkpoint is then called `step_000120_2`, `step_000120_3` … Names that begin with
                a dot, and `last` and `best`, get an underscore in front.
            model: The model's `state_dict`. Tied weights are written once.
            state: Everything else, as nested dicts, lists, tuples, numbers, strings and tensors.
            info: Numbers and strings for the manifest. Tensors with one element become numbers.
            sync: Files that have to be on the disk before the checkpoint is there, such as a log
                whose length is part of the state.
            shared: Several processes save sharded tensors together, each with this call. Rank 0's
                result says whether the checkpoint is complete; the others then call
                `release_shards`.
        """
        begin = perf_counter()
        encoded, encoded_info = encode_state(model, state), encode_info(info)
        rank = 0 if shared is None else shared.rank
        if rank:
            encoded, folders = encoded.shards_only(), folders[:1]
        folders = [Path(folder).absolute() for folder in folders]  # the process may change its own
        self.wait()
        try:
            files = self._buffers.copy(encoded, rank)
        except (RuntimeError, MemoryError) as failure:  # there is not enough memory
            self._results.extend(_not_copied(folder, failure, encoded_info) for folder in folders)
            return
        writer_class = ShardWriter if rank else CheckpointWriter
        writer = writer_class(files, encoded_info, begin, sync, encoded.tree, shared)
        if isinstance(writer, ShardWriter):
            writer.requested = folders[0]
            self._shards.append(writer)
        move_last = not (info.get("emergency") or info.get("weights_only"))
        self._write = _Write(writer, folders, move_last, self._results)
        if self._background:
            self._write.start()
        else:
            self._write.run()

    def finished(self) -> list[SaveResult]:
        """Return what became durable or failed since the last call."""
        results: list[SaveResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def release_shards(self, folders: Collection[Path] | None = None) -> None:
        """Remove this rank's temporary files of these checkpoints, or of all."""
        released = [one for one in self._shards if folders is None or one.requested in folders]
        if self._write is not None and self._write.writer in released:  # rank 0 has failed before
            self.wait()
        self._shards = [one for one in self._shards if one not in released]
        for one in released:
            one.close()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._write is not None:
            self._write.wait()

    def close(self) -> None:
        """Wait until nothing is being written, and free the memory."""
        self.wait()
        self.release_shards()
        self._write = None
        self._buffers = SnapshotBuffers()


def _not_copied(folder: Path, failure: Exception, info: Any) -> SaveResult:
    error = CheckpointError(
        f"The checkpoint {folder} was not written, because the state could not be copied: {failure}"
    )
    error.__cause__ = failure
    return SaveResult(folder, None, decode(info, {}), error, seconds=0.0)


class _Write:
    """One save that is being written, on a thread of its own.

    The thread exists only while it writes, and the interpreter waits for it at exit: it is not
    a daemon. A process that is forked meanwhile has no such thread, and does not wait for it.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        folders: Sequence[Path],
        move_last: bool,
        results: deque[SaveResult],
    ) -> None:
        self.writer = writer
        self._folders = folders
        self._move_last = move_last
        self._results = results
        self._started, self._done = threading.Event(), threading.Event()
        self._claim = threading.Lock()  # of the thread, or of who does not wait for it any more
        self._process = os.getpid()
        self._thread: int | None = None
        self._is_awaited = False

    def start(self) -> None:
        self.writer.is_urgent = False  # until `wait` is called
        thread = threading.Thread(target=self._run_in_thread, name="hookline-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the interpreter is about to exit
            self.run()
        except BaseException:  # of a signal's handler: the thread may or may not have started
            if not self._started.wait(_START_SECONDS) and self._claim.acquire(blocking=False):
                self._done.set()
            raise

    def run(self) -> None:
        """Write into all folders. The results are there only once the memory is free again."""
        try:
            write = self.writer.write
            self._results.extend([write(f, move_last=self._move_last) for f in self._folders])
        finally:
            self._done.set()

    def is_running(self) -> bool:
        return self._process == os.getpid() and not self._done.is_set()

    def wait(self) -> None:
        # Not `Thread.join`: in Python 3.11, Ctrl-C during it marks a running thread as ended.
        if self.is_running():
            self._is_awaited = self.writer.is_urgent = True
            self._set_niceness(0)  # not allowed everywhere
            self._done.wait()

    def _run_in_thread(self) -> None:
        self._started.set()
        if not self._claim.acquire(blocking=False):
            return
        self._thread = threading.get_native_id()
        if not self._is_awaited:
            self._set_niceness(_NICENESS)
        self.run()

    def _set_niceness(self, more: int) -> None:
        """Set the thread's niceness to that of the process and some more."""
        if self._thread is not None and sys.platform == "linux":  # elsewhere threads have none
            with suppress(OSError):
                niceness = os.getpriority(os.PRIO_PROCESS, self._process) + more
                os.setpriority(os.PRIO_PROCESS, self._thread, min(niceness, _LOWEST_PRIORITY))


# -- writing the files -----------------------------------------------------------------------------


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
        self.is_urgent = True  # whether somebody waits; otherwise the write pauses between chunks
        self._files = dict(files)
        self._tree = tree
        self._info = info
        self._hashes: dict[str, str] = {}
        self._others: dict[str, Any] = {}  # sizes and hashes of the shards of other ranks
        self._linkable: Path | None = None
        self._begin = begin
        self._synced = synced
        self._shared = shared
        self._path: Path | None = None  # of the checkpoint that was written last

    def write(self, folder: Path, *, move_last: bool) -> SaveResult:
        """Write a checkpoint that is durable afterwards; errors are part of the result."""
        self._path = None
        error: CheckpointError | None = None
        try:
            hidden = folder.name.startswith(".") or folder.name in ("last", "best")
            if hidden:  # the name of an unfinished checkpoint, or of a pointer
                log.warning("%s is saved as _%s: its name is reserved.", folder, folder.name)
            self._write(folder.with_name(f"_{folder.name}") if hidden else folder, move_last)
        except Exception as failure:
            error = CheckpointError(_describe_failure(failure, folder, self._path))
            error.__cause__ = failure
        seconds = perf_counter() - self._begin
        return SaveResult(folder, self._path, decode(self._info, {}), error, seconds)

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
        if self._others and self._linkable is not None:  # the shards are in the first folder
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
            if "error" in note:
                raise OSError(note["error"])
            for name, facts in note["files"].items():
                (theirs / name).rename(folder / name)
                self._others[name] = facts

    def _wait_for_note(self, parent: Path, name: str, rank: int) -> Path:
        end = monotonic() + _LONGEST_WAIT
        while monotonic() < end:
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
        except OSError as failure:
            note = {"error": f"rank {self._shared.rank}: {failure}"}
        self._write_file(self._folder / f".{_NOTE}", memoryview(json.dumps(note).encode()))
        (self._folder / f".{_NOTE}").rename(self._folder / _NOTE)

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
