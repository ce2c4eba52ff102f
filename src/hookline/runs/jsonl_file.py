"""Files that lines of JSON are appended to, each time with one system call; the log of metrics.

A crash or a full disk can leave part of a line at the end of a file. The next append starts a new
line, unless that part is dropped before. Lines that a full disk refuses wait in memory for the next
append.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hookline.files import file_limits, open_handle
from hookline.masking import mask_known_values
from hookline.runs.jsonable import safe_repr, to_json_number, to_jsonable

log = logging.getLogger("hookline")

VERSION = 1
"""The schema version of records, in the field `v`."""

_MAX_WAITING = 100_000  # lines that wait in memory for space on the disk

_MAX_COUNT = 1 << 63  # Python cannot print integers of thousands of digits

MetricRecord = tuple[Any, Any, float, str, str, Any]
"""step, epoch, time, name, kind, value"""


class WriteRefusedError(OSError):
    """A file may not be written any more; the reason was logged."""


class JsonlFile:
    """A file that lines are appended to.

    A failure to write is logged once and never raised. The lines wait for the next append, unless
    the file was deleted or may not be written any more.

    Args:
        path: The file; created if it does not exist.
        check: Called before each write; if it raises OSError, nothing is written.
        follow_links: The user chose the path: it may be a link or a device. Otherwise only a
            regular file is opened.
    """

    def __init__(
        self, path: Path, check: Callable[[], object] = bool, *, follow_links: bool = False
    ) -> None:
        self.path = path
        self._dropped = 0
        self._waiting: list[bytes] = []
        self._has_reported = False
        self._check = check
        open_file = os.open if follow_links else open_handle
        self._handle: int | None = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._ends_within_line = self._lacks_line_feed()

    @property
    def lost(self) -> int:
        """How many lines are not in the file: dropped ones, and those that wait for space."""
        return self._dropped + len(self._waiting)

    @property
    def is_waiting(self) -> bool:
        """Whether lines wait in memory for space on the disk."""
        return bool(self._waiting)

    def append(self, lines: list[bytes]) -> None:
        """Append lines, each of which ends with a line feed, in one write."""
        lines = [*self._waiting, *lines] if self._waiting else lines
        if not lines:
            return
        separator = b"\n" if self._ends_within_line else b""
        data = separator + b"".join(lines)
        written = 0
        try:
            handle = self._open_handle()
            self._check()
            if os.fstat(handle).st_nlink == 0:
                raise FileNotFoundError("the file was deleted")
            while written < len(data):  # one call, unless the disk is full
                written += os.write(handle, data[written:])
            self._ends_within_line = False
            self._waiting = []
        except OSError as error:
            if written:
                self._ends_within_line = data[written - 1 : written] != b"\n"
            complete = max(0, data[:written].count(b"\n") - len(separator))
            self._keep(lines[complete:], error)

    def _keep(self, lines: list[bytes], error: OSError) -> None:
        """Keep lines that could not be written for the next append, if that can succeed."""
        can_wait = not isinstance(error, (WriteRefusedError, FileNotFoundError))
        self._waiting = lines[:_MAX_WAITING] if can_wait else []
        self._dropped += len(lines) - len(self._waiting)
        if not self._has_reported and not isinstance(error, WriteRefusedError):
            then = "; lines wait in memory until it can be written" if can_wait else " without it"
            log.error("Cannot write %s: %s. Training continues%s.", self.path, error, then)
            self._has_reported = True

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
        """Remove the end of the file if it is part of a line, as a full disk leaves it."""
        if not self._ends_within_line:
            return
        end = self.read(max(0, self.size - file_limits.line_bytes), file_limits.line_bytes)
        line = end.rpartition(b"\n")[2]
        try:
            json.loads(line)
        except ValueError:
            if len(line) < file_limits.line_bytes:
                self.truncate(self.size - len(line))

    def _open_handle(self) -> int:
        if self._handle is None:
            raise OSError(f"{self.path} is closed")
        return self._handle

    def _lacks_line_feed(self) -> bool:
        return self.size > 0 and self.read(self.size - 1, 1) != b"\n"

    def close(self) -> None:
        """Write what waits, flush it to the disk, and close the file."""
        if self._handle is not None:
            self.append([])
        self.sync()
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None


def encode_line(fields: dict[str, Any]) -> bytes:
    """Return fields as a line of JSON."""
    return json.dumps(fields, allow_nan=False, ensure_ascii=False).encode() + b"\n"


# -- metrics --------------------------------------------------------------------------------------


class InvalidValue(NamedTuple):
    """A value that does not match the kind it was logged as; its `repr` is written."""

    text: str
    kind: str


class MetricsLog:
    """Buffers records, and writes them when there are `max_records` or after some seconds.

    `add` is on the training loop's hot path: it appends a tuple. Values are read, which may wait
    for the device, when the buffer is written.
    """

    def __init__(self, file: JsonlFile, max_records: int = 1000, seconds: float = 5.0) -> None:
        self.file = file
        self._max_records = max_records
        self._seconds = seconds
        self._records: list[MetricRecord] = []
        self._flushed = time.time()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may close the run during a write
        self.listener: Callable[[list[MetricRecord]], None] | None = None  # gets what was written

    def add(self, record: MetricRecord) -> None:
        """Add a record, and write the buffer if it is due."""
        self._records.append(record)
        age = record[2] - self._flushed  # negative if the clock was set back
        if len(self._records) >= self._max_records or not 0 <= age < self._seconds:
            self.flush()

    def flush(self) -> None:
        """Read the buffered values and write the records; a forked process drops its copy."""
        if os.getpid() != self._pid:
            self._records.clear()
            return
        with self._lock:
            records = self._records[:]  # other threads may append meanwhile
            del self._records[: len(records)]
            self._flushed = time.time()
            listener = self.listener
            if listener is not None:
                records = [_read_scalar(record) for record in records]
            self.file.append([_encode_record(record) for record in records])
            if listener is not None and records:
                listener(records)


def _read_scalar(record: MetricRecord) -> MetricRecord:
    """Return a record whose scalar has been read from the device, or is an `InvalidValue`."""
    value = record[5]
    if record[4] != "scalar" or type(value) is float or type(value) is InvalidValue:
        return record
    number = to_json_number(value)
    if number is None:
        return (*record[:5], InvalidValue(safe_repr(value), "scalar"))
    return (*record[:5], float(number) if isinstance(number, str) else number)


def _encode_record(record: MetricRecord) -> bytes:
    """Return a record as a line of JSON; usual ones without `json`, which is several times slower.

    NaN and infinities, which JSON lacks, become strings.
    """
    step, epoch, seconds, name, kind, value = _read_scalar(record)
    if kind == "scalar" and type(value) is not InvalidValue:
        value = to_json_number(value)
        is_number = type(value) is float or type(value) is int
        if is_number and _is_count(step) and _is_count(epoch) and type(name) is str:
            head = f'{_HEAD}{step}, "epoch": {epoch}, "time": {seconds!r}, "name": '
            return f"{head}{_quote(name)}{_TAIL}{value!r}}}\n".encode()
    fields = {"v": VERSION, "step": to_jsonable(step), "epoch": to_jsonable(epoch)}
    fields |= {"time": seconds, "name": to_jsonable(name)}
    if type(value) is InvalidValue:
        text = mask_known_values(value.text)
        return encode_line({**fields, "kind": "text", "value": text, "was": value.kind})
    if kind == "text":  # what users log stays as it is, apart from secrets of the environment
        value = mask_known_values(str(value))
    return encode_line({**fields, "kind": kind, "value": to_jsonable(value)})


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


_HEAD = f'{{"v": {VERSION}, "step": '
_TAIL = ', "kind": "scalar", "value": '


@lru_cache(maxsize=4096)
def _quote(name: str) -> str:
    return json.dumps(to_jsonable(name), ensure_ascii=False)
