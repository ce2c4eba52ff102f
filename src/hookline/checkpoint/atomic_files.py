"""Files and folders that exist completely or not at all, also after a crash.

Everything is first written into a temporary folder, `.tmp-<name>-<8 hex digits>.hookline`, beside
its destination and then renamed. The folder holds a marker file, which its writer keeps locked. The
kernel drops the lock when the process dies: a marked folder whose lock is free is a leftover.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from hookline.files import open_handle
from hookline.interrupts import AllowedInterrupts, HeldInterrupts

if TYPE_CHECKING:
    from filelock import BaseFileLock

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files and folders. Readers skip them."""

_FOLDER_NAME = re.compile(r"\.tmp-.+-[0-9a-f]{8}\.hookline", re.DOTALL)
_MARKER = ".hookline-writer"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # Windows does not open folders
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # otherwise the file system does not sync folders
    finally:
        os.close(handle)


def create_folder(folder: Path) -> None:
    """Create a folder with its parents, durably; the entries of at least three are flushed."""
    missing = sum(not path.exists() for path in (folder, *folder.absolute().parents))
    folder.mkdir(parents=True, exist_ok=True)
    for parent in islice(folder.resolve().parents, max(missing, 3)):
        sync(parent)


def hash_file(path: Path) -> str:
    """Return the xxh3_64 hash of a file's bytes, in hexadecimal."""
    with os.fdopen(open_handle(path), "rb") as file:
        return hash_stream(file)


def hash_stream(file: BufferedIOBase) -> str:
    """Return the xxh3_64 hash of an open file's bytes, in hexadecimal."""
    return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file. After a crash it holds either the old or the new text."""
    with replace_file(path, durable=durable) as temporary:
        temporary.write_bytes(text.encode())


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Generator[Path, None, None]:
    """Replace a file with the temporary one that is written in the block."""
    with temporary_folder(path.parent, path.name) as folder:
        temporary = folder / path.name
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
    if durable:
        sync(path.parent)


@contextmanager
def temporary_folder(parent: Path, name: str) -> Generator[Path, None, None]:
    """Create a temporary folder, from which finished files are moved, and remove it at the end."""
    with HeldInterrupts():
        folder, lock = create_locked_folder(parent, name)
        try:
            with AllowedInterrupts():
                yield folder
        finally:
            remove_locked_folder(folder, lock)


def numbered_paths(path: Path) -> Iterator[Path]:
    """Yield a path, then the path with `_2`, `_3` … added to its name."""
    yield path
    yield from (path.with_name(f"{path.name}_{number}") for number in count(2))


def move_to_free_name(source: Path, path: Path) -> Path:
    """Move a file or folder to the first of a path's numbered names that does not exist."""
    for target in numbered_paths(path):
        if target.exists() or target.is_symlink():
            continue
        try:
            return source.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process took the name
                raise
    raise AssertionError


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary folders of processes that died while writing.

    Nothing else is touched: a folder is removed if its name has the form that `temporary_folder`
    gives, it is not a link, it contains the marker, and no process holds the marker's lock. A
    folder of that form without a marker is removed only if it is empty.
    """
    for folder in parent.glob(f"{TEMPORARY}*.hookline"):
        if not _FOLDER_NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        marker = folder / _MARKER
        if marker.is_symlink() or not marker.is_file():
            with suppress(OSError):  # the process died before it created the marker
                folder.rmdir()
            continue
        with suppress(OSError):  # locked by its writer, or locks are not supported here
            remove_locked_folder(folder, _lock(marker))


def create_locked_folder(parent: Path, name: str) -> tuple[Path, BaseFileLock | None]:
    """Create a temporary folder; return it with the lock that it is this process's."""
    while True:
        # Shortened: with the additions, a long name could exceed the limit for file names.
        folder = parent / f"{TEMPORARY}{name[:40]}-{uuid.uuid4().hex[:8]}.hookline"
        folder.mkdir()
        try:
            return folder, _lock(folder / _MARKER)
        except (FileNotFoundError, FileExistsError, TimeoutError):
            continue  # another process removed the folder before it was locked
        except OSError:
            # Locks are not supported here. Without a marker, no other process removes the folder.
            with suppress(OSError):
                (folder / _MARKER).unlink(missing_ok=True)
            return folder, None


def _lock(marker: Path) -> BaseFileLock:
    """Lock a marker file; raise TimeoutError if another process holds the lock."""
    from filelock import FileLock  # here, because the import takes 50 ms

    # Never a soft lock: it would outlive its process.
    lock = FileLock(marker, mode=0o600, blocking=False, fallback_to_soft=False)
    lock.acquire()
    return lock


def remove_locked_folder(folder: Path, lock: BaseFileLock | None) -> None:
    """Remove a folder, the marker last: if this is interrupted, the rest is still recognized."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _MARKER:
                path.unlink(missing_ok=True)
    if lock is not None and os.name == "nt":  # which does not remove files that are open
        lock.release()
    with suppress(OSError):
        if all(path.name == _MARKER for path in folder.iterdir()):
            (folder / _MARKER).unlink(missing_ok=True)
            folder.rmdir()
    if lock is not None:  # last: whoever gets the lock of a file that exists may use the folder
        lock.release()
