"""Reads files of JSON lines that may be damaged, endless, or still be written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookline.arguments import check_path
from hookline.errors import RunError
from hookline.files import file_limits, is_plain_name, open_regular_file, parse_json
from hookline.runs.jsonl_file import VERSION

_BLOCK_SIZE = 1 << 18
_END_SIZE = 1 << 16  # read at a time from the end
_MAX_SHOWN = 5  # damaged lines in one message
_MAX_DAMAGED = 20_000  # then it is not a log, and each further line takes longer than a record
_MAX_NAME = 10_000  # characters
_USUAL_LINE, _FIELDS = 1000, 7  # bytes and fields of a line as it is written


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
    """Reads a file's records without keeping them, and notes what is damaged in it."""

    def __init__(self, file: Path, *, growing: bool = False) -> None:
        self._file = file
        self._is_events = file.name == "events.jsonl"
        self._growing = growing
        self._lines = 0
        self._damaged = 0
        self._first_damaged: list[str] = []
        self._newer_versions: set[str] = set()
        self._problems: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in self.blocks():
            for line in block[:-1].split(b"\n"):
                if (record := self.parse(line)) is not None:
                    yield record

    def blocks(self) -> Iterator[bytes]:
        """Yield blocks of complete lines. `parse` every line, or count them with `skip`."""
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
        if not self._is_events and (usual := _parse_usual(line)) is not None:
            return usual
        try:
            record = _parse_line(line)
            if _is_newer(record):
                if len(self._newer_versions) < _MAX_SHOWN:
                    self._newer_versions.add(str(record["v"])[:20])
                return None
            find = _find_event_problem if self._is_events else find_metric_problem
            problem = find(record)
        except ValueError as error:
            problem = str(error)
        else:
            if problem is None:
                return record
        self._damaged += 1
        if len(self._first_damaged) < _MAX_SHOWN:
            self._first_damaged.append(f"line {self._lines}: {problem}")
        return None

    @property
    def damage(self) -> list[str]:
        """The damage, one line each; complete when everything has been read."""
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
    """Yield a file's records, the last first, reading only as much as is consumed."""
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


def _parse_usual(line: bytes) -> dict[str, Any] | None:
    """Return the record of a usual line of metrics, which takes a fifth of the time; else None."""
    if b"\\" in line or line.count(b"{") != 1 or b"[" in line or len(line) > _USUAL_LINE:
        return None
    try:
        record = json.loads(line.decode())
    except ValueError:
        return None
    is_valid = type(record) is dict and record.get("v") == VERSION and len(record) <= _FIELDS
    return record if is_valid and find_metric_problem(record) is None else None


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


# -- what a record may contain --------------------------------------------------------------------


def find_metric_problem(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a record of the metrics log; None if it is valid."""
    for field in ("step", "epoch", "time"):
        if record.get(field) is not None and not is_finite_number(record[field]):
            return f"its '{field}' is not a number that a float can hold"
    kind, value = record.get("kind"), record.get("value")
    if not _is_name(record.get("name")):
        return f"its 'name' is not a text of up to {_MAX_NAME:,} characters"
    if not _is_name(kind):
        return "its 'kind' is not a text"
    is_valid, expected = _VALUES.get(str(kind), (lambda _: True, ""))
    return None if is_valid(value) else f"its 'value' is not {expected}"


def _find_event_problem(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a record of the event log; None if it is valid."""
    if record.get("time") is not None and not is_finite_number(record["time"]):
        return "its 'time' is not a number that a float can hold"
    if not _is_name(record.get("kind")):
        return "its 'kind' is not a text"
    return None


def is_finite_number(value: Any) -> bool:
    """Return whether a value is an integer or float that a float can hold."""
    if type(value) is not int and type(value) is not float:
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above the range of floats
        return False


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= _MAX_NAME


def _is_scalar(value: Any) -> bool:
    return is_finite_number(value) or value in ("NaN", "Infinity", "-Infinity")


def _is_histogram(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), list) for name in ("counts", "edges")
    )


def _is_image(value: Any) -> bool:
    path = value.get("path") if isinstance(value, dict) else None
    return isinstance(path, str) and path[:6] == "media/" and is_plain_name(path[6:])


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "scalar": (_is_scalar, "a number that a float can hold"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "histogram": (_is_histogram, "a histogram"),
    "image": (_is_image, "an image in the folder media"),
}
