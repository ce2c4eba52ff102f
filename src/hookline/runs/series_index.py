"""Where the lines of single series stand in a long metrics log, so that reading one again is fast.

Searching a log of 1.4 GB for a series takes seconds. The first reading notes where its lines begin,
in a file beside the log; later readings go there. The index belongs to the first bytes of the log,
and is used only while their end is the same: a log that was rewound has another one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from hookline.checkpoint.atomic_files import write_atomic
from hookline.files import file_limits, open_regular_file, parse_json, read_regular_file

INDEX = "metrics.index.json"
MIN_BYTES = 1 << 26  # a shorter log is searched in a tenth of a second

_TAIL = 1 << 12  # the bytes that are compared
_MAX_NAMES = 1000
_USUAL_LINE = 256

log = logging.getLogger(__name__)


class SeriesIndex:
    """The index of the first `size` bytes of a metrics log, which are complete lines."""

    def __init__(self, metrics: Path, size: int) -> None:
        self._metrics, self._size = metrics, size
        self._file = metrics.with_name(INDEX)

    def read_lines(self, name: str) -> list[bytes] | None:
        """Return the lines that may have this name; None if the index does not know them."""
        try:
            with open_regular_file(self._metrics) as file:
                distances = self._read_series(file).get(name)
                if distances is not None:
                    return [_read_line(file, offset) for offset in accumulate(distances)]
        except (OSError, ValueError, TypeError) as error:
            log.debug("%s is not used: %s", self._file, error)
        return None

    def add(self, name: str, offsets: Sequence[int]) -> None:
        """Store where the lines begin that may have this name. A folder may be read-only."""
        try:
            with open_regular_file(self._metrics) as file:
                distances = [b - a for a, b in pairwise((0, *offsets))]
                series = self._read_series(file) | {name: distances}
                tail = self._hash_tail(file)
            index = {"v": 1, "size": self._size, "tail": tail, "series": series}
            text = json.dumps(index, separators=(",", ":"))
            if len(series) <= _MAX_NAMES and len(text) <= file_limits.manifest_bytes:
                write_atomic(self._file, text, durable=False)
        except OSError as error:
            log.debug("%s cannot be written: %s", self._file, error)

    def _read_series(self, file: BinaryIO) -> dict[str, Any]:
        """Return the series that are stored; none if there are none, or they are of another log."""
        try:
            index = parse_json(read_regular_file(self._file, file_limits.manifest_bytes))
            if (index["v"], index["size"], index["tail"]) == (1, self._size, self._hash_tail(file)):
                return dict(index["series"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.debug("%s is not used: %s", self._file, error)
        return {}

    def _hash_tail(self, file: BinaryIO) -> str:
        start = max(0, self._size - _TAIL)
        file.seek(start)
        return xxhash.xxh3_64_hexdigest(file.read(self._size - start))


def _read_line(file: BinaryIO, offset: int) -> bytes:
    """Return the line that begins at an offset; ValueError if none does."""
    if not 0 <= offset < 1 << 60:
        raise ValueError(f"{offset} is no place in a file")
    before = min(offset, 1)  # the end of the line before it
    text = os.pread(file.fileno(), _USUAL_LINE, offset - before)
    if before and not text.startswith(b"\n"):
        raise ValueError(f"no line begins at {offset}")
    end = text.find(b"\n", before)
    if end < 0:
        file.seek(offset)
        text, before = file.readline(file_limits.line_bytes), 0
        end = len(text) - 1
        if not text.endswith(b"\n"):
            raise ValueError(f"the line at {offset} is incomplete")
    return text[before:end]
