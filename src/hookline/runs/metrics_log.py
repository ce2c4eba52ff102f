"""The buffered writer of a run's metrics."""

from __future__ import annotations

import json
import threading
import time
from functools import lru_cache
from typing import Any, NamedTuple

from hookline.runs.jsonable import safe_repr, to_json_number, to_jsonable
from hookline.runs.jsonl_file import VERSION, JsonlFile, encode_line

__all__ = ["InvalidValue", "MetricRecord", "MetricsLog"]

MetricRecord = tuple[Any, Any, float, str, str, Any]
"""step, epoch, time, name, kind, value"""


class InvalidValue(NamedTuple):
    """A value that does not match the kind it was logged as; its `repr` is written."""

    text: str
    kind: str


class MetricsLog:
    """Buffers records, and writes them when there are many or the last write is long ago.

    `add` is on the training loop's hot path: it appends a tuple. Values are read, which may wait
    for the device, when the buffer is written.

    Args:
        file: The file to write.
        max_records: Write when the buffer has this many records.
        seconds: Write when this much time has passed since the last write. It is checked in `add`.
    """

    def __init__(self, file: JsonlFile, max_records: int = 1000, seconds: float = 5.0) -> None:
        self.file = file
        self._max_records = max_records
        self._seconds = seconds
        self._records: list[MetricRecord] = []
        self._flushed = time.time()
        self._lock = threading.RLock()  # a signal handler may close the run during a write

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
            self.file.append([_encode_record(record) for record in records])


def _encode_record(record: MetricRecord) -> bytes:
    """Return a record as a line of JSON; usual ones without `json`, which is several times slower.

    NaN and infinities, which JSON lacks, become strings.
    """
    step, epoch, seconds, name, kind, value = record
    encoded = to_json_number(value) if kind == "scalar" else value
    is_number = type(encoded) is float or type(encoded) is int
    if is_number and type(step) is int and type(epoch) is int and type(name) is str:
        head = f'{_HEAD}{step}, "epoch": {epoch}, "time": {seconds!r}, "name": '
        return f"{head}{_quote(name)}{_TAIL}{encoded!r}}}\n".encode()
    fields = {"v": VERSION, "step": to_jsonable(step), "epoch": to_jsonable(epoch)}
    fields |= {"time": seconds, "name": to_jsonable(name)}
    if encoded is None:
        is_invalid = type(value) is InvalidValue
        encoded = value if is_invalid else InvalidValue(safe_repr(value), kind)
    if type(encoded) is InvalidValue:
        return encode_line({**fields, "kind": "text", "value": encoded.text, "was": encoded.kind})
    return encode_line({**fields, "kind": kind, "value": to_jsonable(encoded)})


_HEAD = f'{{"v": {VERSION}, "step": '
_TAIL = ', "kind": "scalar", "value": '


@lru_cache(maxsize=4096)
def _quote(name: str) -> str:
    return json.dumps(to_jsonable(name), ensure_ascii=False)
