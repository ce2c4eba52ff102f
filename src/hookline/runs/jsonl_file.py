"""Files that lines of JSON are appended to, each time with one system call.

A crash or a full disk can leave part of a line at the end of a file. The next append starts a new
line, unless that part is dropped before.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookline.files.limits import file_limits
from hookline.files.regular_files import open_handle

__all__ = ["VERSION", "JsonlFile", "encode_line"]

log = logging.getLogger("hookline")

VERSION = 1
"""The schema version of records, in the field `v`."""


class JsonlFile:
    """A file that lines are appended to.

    A failure to write is logged once and counted in `lost`, never raised.

    Args:
        path: The file; created if it does not exist.
        check: Called before each write with whether the file was deleted; if it raises OSError,
            which it has logged itself, nothing is written. By default a deleted file is not
            written.
        follow_links: The user chose the path: it may be a link or a device. Otherwise only a
            regular file is opened.
    """

    def __init__(
        self,
        path: Path,
        check: Callable[[bool], None] | None = None,
        *,
        follow_links: bool = False,
    ) -> None:
        self.path = path
        self.lost = 0
        self._check = check
        open_file = os.open if follow_links else open_handle
        self._handle: int | None = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._ends_within_line = self._lacks_line_feed()

    def append(self, lines: list[bytes]) -> None:
        """Append lines, each of which ends with a line feed, in one write."""
        if not lines:
            return
        if self._handle is None:
            self._count_lost(lines, OSError("the file is closed"))
            return
        try:
            is_deleted = os.fstat(self._handle).st_nlink == 0
        except OSError as error:  # such as a stale handle of a network file system
            self._count_lost(lines, error)
            return
        if self._check is not None:
            try:
                self._check(is_deleted)
            except OSError:
                self.lost += len(lines)
                return
        elif is_deleted:
            self._count_lost(lines, FileNotFoundError("the file was deleted"))
            return
        separator = b"\n" if self._ends_within_line else b""
        data = separator + b"".join(lines)
        written = 0
        try:
            while written < len(data):  # one call, unless the disk is full
                written += os.write(self._handle, data[written:])
        except OSError as error:
            if written:
                self._ends_within_line = data[written - 1 : written] != b"\n"
            complete = max(0, data[:written].count(b"\n") - len(separator))
            self._count_lost(lines[complete:], error)
        else:
            self._ends_within_line = False

    def sync(self) -> None:
        """Flush what was written to the disk."""
        if self._handle is not None:
            with suppress(OSError):
                os.fsync(self._handle)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self._open_handle()).st_size

    def read(self, start: int, count: int) -> bytes:
        """Return bytes of the file."""
        return os.pread(self._open_handle(), count, start)

    def extend(self, chunks: Iterable[bytes]) -> None:
        """Append bytes as they are, and flush them to the disk; raise OSError if that fails."""
        handle = self._open_handle()
        for chunk in chunks:
            written = 0
            while written < len(chunk):
                written += os.write(handle, chunk[written:])
        os.fsync(handle)
        self._ends_within_line = self._lacks_line_feed()

    def truncate(self, size: int) -> None:
        """Remove what is behind a position, durably; raise OSError if that fails."""
        os.ftruncate(self._open_handle(), size)
        os.fsync(self._open_handle())
        self._ends_within_line = self._lacks_line_feed()

    def drop_incomplete_line(self) -> None:
        """Remove the end of the file if it is part of a line, as a full disk leaves it.

        A last line that is whole and lacks only its line feed is kept. So is one that is longer
        than any record.
        """
        if not self._ends_within_line:
            return
        size = self.size
        start = max(0, size - file_limits.line_bytes)
        end = self.read(start, size - start)
        feed = end.rfind(b"\n")
        if feed < 0 < start:
            return
        try:
            json.loads(end[feed + 1 :])
        except ValueError:
            self.truncate(start + feed + 1)

    def _open_handle(self) -> int:
        if self._handle is None:
            raise OSError(f"{self.path} is closed")
        return self._handle

    def _lacks_line_feed(self) -> bool:
        return self.size > 0 and self.read(self.size - 1, 1) != b"\n"

    def close(self) -> None:
        """Flush what was written to the disk, and close the file."""
        self.sync()
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def _count_lost(self, lines: list[bytes], error: OSError) -> None:
        if not self.lost:
            log.error("Cannot write %s: %s. Training continues without it.", self.path, error)
        self.lost += len(lines)


def encode_line(fields: dict[str, Any]) -> bytes:
    """Return fields as a line of JSON."""
    return json.dumps(fields, allow_nan=False, ensure_ascii=False).encode() + b"\n"
