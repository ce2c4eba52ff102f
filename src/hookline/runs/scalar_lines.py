"""The scalars of a metrics log, read in blocks: a run may have millions of values.

Usual lines are read with a pattern: parsing JSON takes several times as long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from hookline.runs.jsonl_reader import JsonlReader

__all__ = ["Scalar", "read_scalars"]

# A line as the metrics log writes most. The groups are step, time, name and value. Longer numbers
# and names are left to the parser, which checks them.
_NUMBER = rb"-?(?:0|[1-9]\d{0,17}+)"
_SCALAR_LINE = re.compile(
    rb'^{"v": 1, "step": (%b), "epoch": (?>%b|null), "time": (\d{1,18}+\.\d{1,18}+), '
    rb'"name": ("[^"\\\x00-\x1f]{0,1000}+"), "kind": "scalar", '
    rb'"value": "?((?<= )%b(?:\.\d{1,30}+)?(?:e[+-]?\d{1,2})?(?=})|'
    rb'(?<=")(?:-?Infinity|NaN)(?="))"?}$' % (_NUMBER, _NUMBER, _NUMBER),
    re.MULTILINE,
)

Scalar = tuple[bytes, bytes, bytes, bytes]


def read_scalars(
    reader: JsonlReader, on_other: Callable[[dict[str, Any]], None] | None = None
) -> Iterator[tuple[int, list[Scalar]]]:
    """Yield the size of each block of lines, and its scalars: step, time, name, value, as JSON.

    A value is a number, `NaN`, `Infinity` or `-Infinity`, all of which `float` reads.

    Args:
        reader: The metrics log.
        on_other: Called with each record of another kind.
    """
    for block in reader.blocks():
        scalars: list[Scalar] = _SCALAR_LINE.findall(block) if _is_utf8(block) else []
        if len(scalars) == block.count(b"\n"):
            reader.skip(len(scalars))
        else:  # there are other lines between them
            parsed = (_parse_scalar(reader, line, on_other) for line in block[:-1].split(b"\n"))
            scalars = [scalar for scalar in parsed if scalar is not None]
        yield len(block), scalars


def _parse_scalar(
    reader: JsonlReader, line: bytes, on_other: Callable[[dict[str, Any]], None] | None
) -> Scalar | None:
    """Return the groups of `_SCALAR_LINE` for any line; None if it is not a scalar."""
    match = _SCALAR_LINE.fullmatch(line)
    if match is not None and _is_utf8(line):
        reader.skip(1)
        step, seconds, name, value = match.groups()
        return step, seconds, name, value
    record = reader.parse(line)
    if record is None:
        return None
    if record["kind"] != "scalar":
        if on_other is not None:
            on_other(record)
        return None
    fields: list[Any] = [record.get("step"), record.get("time"), record["name"]]
    step, seconds, name = (json.dumps(field).encode() for field in fields)
    return step, seconds, name, repr(float(record["value"])).encode()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
