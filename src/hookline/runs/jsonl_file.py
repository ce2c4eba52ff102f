"""Files of JSON lines: appended to by one system call, each line whole after a kill.

A killed process, or a full disk, can leave a part of a line at the end of a file. Whoever appends
next starts on a fresh line, and whoever reads skips lines that are not JSON.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hookline.runs.jsonable import number, plain, shown

__all__ = ["VERSION", "InvalidValue", "Journal", "JsonlFile", "line", "read_records"]

log = logging.getLogger("hookline")

VERSION = 1
"""The schema of records, the field `v`."""

Record = tuple[Any, Any, float, str, str, Any]
"""step, epoch, time, name, kind, value"""


class InvalidValue(NamedTuple):
    """A value that does not fit the kind it was logged as; its `repr` is recorded."""

    text: str
    was: str


class JsonlFile:
    """A file that lines are appended to. A failure is logged once and counted, never raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._handle: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._handle).st_size
        self._torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"

    def append(self, lines: list[bytes]) -> None:
        """Append lines, each of which ends with a line feed, by one write."""
        if not lines:
            return
        if self._handle is None:
            self._failed(lines, OSError("the file is closed"))
            return
        fresh = b"\n" if self._torn else b""
        data = fresh + b"".join(lines)
        written = 0
        try:
            while written < len(data):  # one call, unless the disk is full
                written += os.write(self._handle, data[written:])
        except OSError as error:
            if written:
                self._torn = data[written - 1 : written] != b"\n"
            whole = max(0, data[:written].count(b"\n") - len(fresh))
            self._failed(lines[whole:], error)
        else:
            self._torn = False

    def sync(self) -> None:
        """Make what was written durable."""
        if self._handle is not None:
            with suppress(OSError):
                os.fsync(self._handle)

    def close(self) -> None:
        """Make what was written durable, and close the file."""
        self.sync()
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def _failed(self, lines: list[bytes], error: OSError) -> None:
        if not self.lost:
            log.error("Cannot write %s: %s. Training goes on without a record.", self.path, error)
        self.lost += len(lines)


class Journal:
    """Collects records and writes them when there are many, or the first of them is old.

    `add` is on training's hot path: it appends a tuple. Values are read, and so a device is waited
    for, when the buffer is written.

    Args:
        file: Where to write.
        most: Write when so many records are waiting.
        seconds: Write when so much time has passed since the last write (seen at the next `add`).
    """

    def __init__(self, file: JsonlFile, most: int = 1000, seconds: float = 5.0) -> None:
        self.file = file
        self._most = most
        self._seconds = seconds
        self._records: list[Record] = []
        self._flushed = time.time()
        self._lock = threading.RLock()  # a signal's handler may close the run while it is written

    def add(self, record: Record) -> None:
        """Append a record, and write the buffer when it is due."""
        self._records.append(record)
        # A clock that was set back counts as due, too.
        if len(self._records) >= self._most or not 0 <= record[2] - self._flushed < self._seconds:
            self.flush()

    def flush(self) -> None:
        """Read the waiting values and write the records."""
        with self._lock:
            records = self._records[:]  # other threads may append meanwhile
            del self._records[: len(records)]
            self._flushed = time.time()
            self.file.append([_line(record) for record in records])


def line(fields: dict[str, Any]) -> bytes:
    """Return fields as a line of JSON."""
    return json.dumps(fields, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of `metrics.jsonl` or `events.jsonl`, skipping damaged lines."""
    with Path(path).open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                return  # being written, or cut by a kill
            with suppress(ValueError):
                record = json.loads(raw)
                if isinstance(record, dict):
                    yield record


def _line(record: Record) -> bytes:
    """Return a record as a line of JSON: what is usual by hand, some times as fast as `json`."""
    step, epoch, when, name, kind, value = record
    found = number(value) if kind == "scalar" else value
    usual = type(found) is float or type(found) is int
    if usual and type(step) is int and type(epoch) is int and type(name) is str:
        head = f'{_HEAD}{step}, "epoch": {epoch}, "time": {when!r}, "name": '
        return f"{head}{_quoted(name)}{_TAIL}{found!r}}}\n".encode()
    fields = {"v": VERSION, "step": plain(step), "epoch": plain(epoch), "time": when}
    fields["name"] = plain(name)
    if found is None:
        found = value if type(value) is InvalidValue else InvalidValue(shown(value), kind)
    if type(found) is InvalidValue:
        return line({**fields, "kind": "text", "value": found.text, "was": found.was})
    return line({**fields, "kind": kind, "value": plain(found)})


_HEAD = f'{{"v": {VERSION}, "step": '
_TAIL = ', "kind": "scalar", "value": '


@lru_cache(maxsize=4096)
def _quoted(name: str) -> str:
    return json.dumps(plain(name), ensure_ascii=False)
