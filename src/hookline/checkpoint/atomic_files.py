"""Writing that survives a kill: a file or a folder is there as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

__all__ = ["TEMPORARY", "clean", "digest", "sync", "temporary_folder", "write_atomic"]

TEMPORARY = ".tmp-"
"""How the names of unfinished files and folders begin. Whoever reads skips them."""

_CHUNK = 1 << 22


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, survive a power cut."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # Windows opens no folders
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """Return the xxh3_64 of a file's bytes, in hexadecimal."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def write_atomic(path: Path, text: str) -> None:
    """Replace a file. After a kill it holds the old text or the new one, never a part."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(text.encode())
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def temporary_folder(parent: Path, name: str) -> Generator[Path, None, None]:
    """Give a new folder beside the final one, and remove it unless it was renamed.

    It is locked while its process lives; the kernel drops the lock when the process is killed, so
    that `clean` never takes a folder which somebody still writes.
    """
    folder = parent / f"{TEMPORARY}{name}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # nothing is there after the rename
        if lock is not None:
            os.close(lock)


def clean(parent: Path) -> None:
    """Remove what killed processes left unfinished."""
    for left in parent.glob(f"{TEMPORARY}*"):
        if not left.is_dir():
            with suppress(OSError):
                left.unlink()
            continue
        lock = _lock(left)
        if lock is not None:  # so nobody writes it
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder; None when another process holds it, or where folders cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
