"""Files of JSON lines: each append is one system call, and readers skip damaged lines.

A crash or a full disk can leave part of a line at the end of a file. The next append starts a new
line.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hookline.arguments import check_path
from hookline.errors import RunError
from hookline.files.limits import file_limits
from hookline.files.regular_files import open_handle, open_regular_file
from hookline.files.strict_json import parse_json
from hookline.masking import mask_known_values
from hookline.printable import printable
from hookline.runs.jsonable import safe_repr, to_json_number, to_jsonable
from hookline.runs.record_checks import find_event_problem, find_metric_problem

__all__ = [
    "VERSION",
    "InvalidValue",
    "JsonlFile",
    "JsonlReader",
    "MetricRecord",
    "MetricsLog",
    "encode_line",
    "read_jsonl_backwards",
    "read_records",
]

log = logging.getLogger("hookline")

VERSION = 1
"""The schema version of records, in the field `v`."""

_MAX_COUNT = 1 << 63  # Python cannot print integers of thousands of digits
_BLOCK_SIZE = 1 << 18
_END_SIZE = 1 << 16  # read at a time from the end
_MAX_SHOWN = 5  # damaged lines in one message
_MAX_DAMAGED = 20_000  # then it is not a log, and each further line takes longer than a record


class JsonlFile:
    """A file that lines are appended to.

    A failure to write is logged once and counted in `lost`, never raised.

    Args:
        path: The file; created if it does not exist.
        check: Called with the file's descriptor before each write; if it raises OSError, which it
            has logged itself, nothing is written. By default the file must not have been deleted.
        follow_links: The user chose the path: it may be a link or a device. Otherwise only a
            regular file is opened.
    """

    def __init__(
        self,
        path: Path,
        check: Callable[[int], None] | None = None,
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
        if self._check is not None:
            try:
                self._check(self._handle)
            except OSError:
                self.lost += len(lines)
                return
        elif os.fstat(self._handle).st_nlink == 0:
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


# -- metrics -------------------------------------------------------------------------------------

MetricRecord = tuple[Any, Any, float, str, str, Any]
"""step, epoch, time, name, kind, value"""


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
        self._lock = threading.RLock()  # a signal handler may close the run during a write
        self.listener: Callable[[list[MetricRecord]], None] | None = None  # gets what was written

    def add(self, record: MetricRecord) -> None:
        """Add a record, and write the buffer if it is due."""
        self._records.append(record)
        age = record[2] - self._flushed  # negative if the clock was set back
        if len(self._records) >= self._max_records or not 0 <= age < self._seconds:
            self.flush()

    def flush(self) -> None:
        """Read the buffered values and write the records."""
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
    """Return a record whose scalar has been read from the device."""
    value = record[5]
    if record[4] != "scalar" or type(value) is float or type(value) is int:
        return record
    number = to_json_number(value)
    if number is None:
        number = value if type(value) is InvalidValue else InvalidValue(safe_repr(value), "scalar")
    return (*record[:5], float(number) if isinstance(number, str) else number)


def _encode_record(record: MetricRecord) -> bytes:
    """Return a record as a line of JSON; usual ones without `json`, which is several times slower.

    NaN and infinities, which JSON lacks, become strings.
    """
    step, epoch, seconds, name, kind, value = record
    encoded = to_json_number(value) if kind == "scalar" else value
    is_number = type(encoded) is float or type(encoded) is int
    if is_number and _is_count(step) and _is_count(epoch) and type(name) is str:
        head = f'{_HEAD}{step}, "epoch": {epoch}, "time": {seconds!r}, "name": '
        return f"{head}{_quote(name)}{_TAIL}{encoded!r}}}\n".encode()
    fields = {"v": VERSION, "step": to_jsonable(step), "epoch": to_jsonable(epoch)}
    fields |= {"time": seconds, "name": to_jsonable(name)}
    if encoded is None:
        is_invalid = type(value) is InvalidValue
        encoded = value if is_invalid else InvalidValue(safe_repr(value), kind)
    if type(encoded) is InvalidValue:
        return encode_line(
            {
                **fields,
                "kind": "text",
                "value": mask_known_values(encoded.text),
                "was": encoded.kind,
            }
        )
    if kind == "text":  # what users log stays as it is, apart from secrets of the environment
        encoded = mask_known_values(str(encoded))
    return encode_line({**fields, "kind": kind, "value": to_jsonable(encoded)})


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


_HEAD = f'{{"v": {VERSION}, "step": '
_TAIL = ', "kind": "scalar", "value": '


@lru_cache(maxsize=4096)
def _quote(name: str) -> str:
    return json.dumps(to_jsonable(name), ensure_ascii=False)


# -- reading --------------------------------------------------------------------------------------


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of `metrics.jsonl` or `events.jsonl`, skipping damaged lines.

    Raises:
        RunError: It cannot be read: it is missing, a link or not a regular file, or a line is
            longer than `hookline.file_limits` allows.
    """
    path = Path(check_path("read_records(path)", path, "a file of records"))
    try:
        with open_regular_file(path) as file:
            while line := file.readline(file_limits.line_bytes + 1):
                if len(line) > file_limits.line_bytes:
                    raise RunError(f"{path} cannot be read further: {_describe_long_line()}.")
                if line.endswith(b"\n"):  # the last line may be incomplete
                    with suppress(ValueError):
                        yield _parse_line(line)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


class JsonlReader:
    """Reads a file's records without keeping them, and notes what is damaged in it.

    Args:
        file: `events.jsonl`, or a file of metrics.
        growing: The file may still be written: then an incomplete last line is not damage.
    """

    def __init__(self, file: Path, *, growing: bool = False) -> None:
        self._file = file
        self._find_problem = (
            find_event_problem if file.name == "events.jsonl" else find_metric_problem
        )
        self._growing = growing
        self._lines = 0
        self._damaged = 0
        self._first_damaged: list[str] = []
        self._newer_versions: list[str] = []
        self._problems: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in self.blocks():
            for line in block[:-1].split(b"\n"):
                if (record := self.parse(line)) is not None:
                    yield record

    def blocks(self) -> Iterator[bytes]:
        """Yield blocks of complete lines. `parse` every line, or count them with `skip`.

        Reading ends at a line that is longer than `hookline.file_limits` allows: it may be endless.
        """
        name, limit = self._file.name, file_limits.line_bytes
        try:
            with open_regular_file(self._file) as file:
                end = os.fstat(file.fileno()).st_size  # what is written meanwhile could be endless
                while file.tell() < end and (block := file.read(_BLOCK_SIZE)):
                    rest = file.readline(limit)
                    block += rest
                    is_complete = block.endswith(b"\n")
                    if not is_complete:
                        block = block[: block.rfind(b"\n") + 1]
                    if block:
                        yield block
                    if self._damaged > _MAX_DAMAGED:
                        self._problems.append(
                            f"{name} is read up to line {self._lines}: too many are damaged"
                        )
                        return
                    if not is_complete and len(rest) == limit:
                        self._problems.append(
                            f"{name} is read up to line {self._lines}: {_describe_long_line()}"
                        )
                        return
                    if not is_complete and not self._growing:
                        self._problems.append(f"{name}: its last line is incomplete")
        except FileNotFoundError:
            self._problems.append(f"{name} is missing")
        except OSError as error:
            self._problems.append(f"{name} cannot be read: {error}")

    def skip(self, lines: int) -> None:
        """Count lines that are read without `parse`."""
        self._lines += lines

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """Return the record of the next line; None if it is damaged or of a newer version."""
        self._lines += 1
        try:
            record = _parse_line(line)
            if _is_newer(record):
                self._note_version(record["v"])
                return None
            problem = self._find_problem(record)
        except ValueError as error:
            problem = str(error)
        else:
            if problem is None:
                return record
        self._damaged += 1
        if len(self._first_damaged) < _MAX_SHOWN:
            self._first_damaged.append(f"line {self._lines}: {problem}")
        return None

    def _note_version(self, version: int) -> None:
        shown = printable(version, 20)
        if shown not in self._newer_versions and len(self._newer_versions) < _MAX_SHOWN:
            self._newer_versions.append(shown)

    @property
    def damage(self) -> list[str]:
        """What is damaged, one line each; complete when everything has been read."""
        name, problems = self._file.name, [*self._problems]
        if self._damaged:
            lines = "; ".join(self._first_damaged)
            more = "; …" if self._damaged > _MAX_SHOWN else ""
            plural = "line" if self._damaged == 1 else "lines"
            problems.append(f"{name}: {self._damaged} {plural} cannot be read ({lines}{more})")
        if self._newer_versions:
            versions = ", ".join(sorted(self._newer_versions))
            problems.append(
                f"{name}: records of version {versions} were skipped; this hookline reads up to "
                f"{VERSION}. Install a newer one: pip install -U hookline"
            )
        return problems


def read_jsonl_backwards(file: Path, max_bytes: int = 1 << 22) -> Iterator[dict[str, Any]]:
    """Yield a file's records, the last first, reading only as much as is consumed.

    Args:
        file: `metrics.jsonl` or `events.jsonl`.
        max_bytes: How many bytes to read at most; a run may have gigabytes.
    """
    damaged = 0
    for line in _read_lines_backwards(file, max_bytes):
        try:
            record = _parse_line(line)
            if not _is_newer(record):
                yield record
        except ValueError:
            damaged += 1
            if damaged > _MAX_DAMAGED:
                return


def _read_lines_backwards(file: Path, max_bytes: int) -> Iterator[bytes]:
    try:
        with open_regular_file(file) as lines:
            end = position = lines.seek(0, os.SEEK_END)
            rest = b""
            while position > 0 and end - position < max_bytes:
                size = min(_END_SIZE, position)
                position = lines.seek(position - size)
                # The first line may begin in the block before.
                rest, *complete = (lines.read(size) + rest).split(b"\n")
                yield from reversed(complete)
            if position == 0:
                yield rest
    except OSError:
        return


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the record of a line; raise ValueError if it has none."""
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (column {error.colno})") from None
    if isinstance(record, dict):
        return record
    raise ValueError("it is not an object")


def _is_newer(record: dict[str, Any]) -> bool:
    """Return whether a newer version wrote a record; raise ValueError if it has no version."""
    version = record.get("v")
    if type(version) is not int or version < 1:
        raise ValueError("it has no version 'v'")
    return version > VERSION


def _describe_long_line() -> str:
    return (
        f"the next line has more than {file_limits.line_bytes:,} bytes; "
        "hookline.file_limits allows more"
    )
