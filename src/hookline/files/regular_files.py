"""Opening files of a folder that anybody may have written.

A link could lead out of the folder, a FIFO would block for ever, a device would never end: only
regular files are opened, and links are not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Windows has neither. O_NONBLOCK: opening a FIFO does not wait for its writer.
_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)


class FileRefusedError(OSError):
    """The file is a link, not a regular file, or too large."""


def open_handle(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file as `os.open` does; anything else, and links, are refused."""
    name = Path(path).name
    try:
        handle = os.open(path, flags | _FLAGS, mode)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        refused = describe_kind(path)
        if refused is None:
            raise
        raise FileRefusedError(f"{name} is {refused}; expected a regular file") from error
    try:
        kind = _name_kind(os.fstat(handle).st_mode)
        if kind is not None:
            raise FileRefusedError(f"{name} is {kind}; expected a regular file")
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_regular_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; see `open_handle` for what is refused."""
    return os.fdopen(open_handle(path), "rb")


def read_regular_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the contents of a regular file; one of more than `max_bytes` is refused, too."""
    contents = b""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            # Not as much as is allowed: a buffer of that size would be allocated.
            contents = file.read(size + 1)
            if len(contents) > size:  # it has grown meanwhile
                contents += file.read(max_bytes + 1 - len(contents))
    if max(size, len(contents)) > max_bytes:
        raise FileRefusedError(
            f"{Path(path).name} has more than {max_bytes:,} bytes; hookline.file_limits allows more"
        )
    return contents


def count_hole_bytes(file: BinaryIO, more_than: int) -> int:
    """Return how many bytes of a file have no data on the disk; it stops above a number."""
    size, position, holes = os.fstat(file.fileno()).st_size, 0, 0
    if size <= more_than or not hasattr(os, "SEEK_DATA"):  # Windows
        return 0
    while position < size and holes <= more_than:
        try:
            data = os.lseek(file.fileno(), position, os.SEEK_DATA)
            position, holes = os.lseek(file.fileno(), data, os.SEEK_HOLE), holes + data - position
        except OSError as error:
            return holes + size - position if error.errno == errno.ENXIO else holes
    return holes


def describe_kind(path: str | os.PathLike[str]) -> str | None:
    """Return what a path is if it is not a regular file; None also if there is nothing."""
    try:
        return _name_kind(os.lstat(path).st_mode)
    except OSError:
        return None


def _name_kind(mode: int) -> str | None:
    """Return what a file is if it is not a regular file."""
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")
