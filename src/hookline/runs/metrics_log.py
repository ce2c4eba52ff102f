"""The values of a run, buffered on their way to `metrics.jsonl`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from hookline.masking import mask_known_values
from hookline.runs.jsonable import safe_repr, to_json_number, to_jsonable
from hookline.runs.jsonl_file import VERSION, JsonlFile, encode_line

__all__ = ["InvalidValue", "MetricRecord", "MetricsLog"]

_MAX_COUNT = 1 << 63  # Python cannot print integers of thousands of digits

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
