"""The run's record, as its trackers get it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookline.context import to_float
from hookline.files.limits import file_limits
from hookline.files.regular_files import open_regular_file
from hookline.files.strict_json import parse_json
from hookline.masking import mask_known_values
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_file import VERSION
from hookline.runs.jsonl_reader import read_jsonl_backwards
from hookline.runs.metrics_log import InvalidValue, MetricRecord
from hookline.runs.record_checks import find_metric_problem, is_finite_number
from hookline.trackers.tracker import TrackedValue

__all__ = ["read_from_step", "read_range", "to_tracked_value"]

_BATCH = 1000
_MAX_STEP = (1 << 63) - 1


def to_tracked_value(record: MetricRecord, folder: Path | None) -> TrackedValue:
    """Return a record as trackers get it: with a name and a step, and scalars as floats.

    Args:
        record: the record.
        folder: the run's folder, which the paths of images are relative to.
    """
    step, _, seconds, name, kind, value = record
    if type(value) is InvalidValue:
        text: Any = value.text
        kind, value = "text", text
    if kind == "scalar":
        value = to_float(value)
    elif kind == "text":
        value = mask_known_values(to_jsonable(str(value)))
    elif kind == "image":
        value = (folder or Path()) / str(record[5]["path"])
    name = name if type(name) is str else str(to_jsonable(name))
    return TrackedValue(_to_int(step), to_jsonable(name) or "_", kind, value, seconds)


def _to_int(step: Any) -> int:
    """Return a step as the tools can store it: an integer of 64 bits."""
    try:
        return max(-_MAX_STEP, min(_MAX_STEP, int(step)))
    except (TypeError, ValueError, OverflowError):
        return 0


def read_range(file: Path, start: int, end: int) -> Iterator[tuple[list[MetricRecord], int]]:
    """Yield the records between two positions of a metrics log, some at a time.

    Each time with the position behind them. Lines that are damaged are left out.
    """
    records: list[MetricRecord] = []
    with open_regular_file(file) as lines:
        position = lines.seek(start)
        while position < end and (line := lines.readline(file_limits.line_bytes)):
            position += len(line)
            with suppress(ValueError):
                if (record := _to_metric_record(parse_json(line))) is not None:
                    records.append(record)
            if len(records) == _BATCH:
                yield records, position
                records = []
    if records:
        yield records, position


def read_from_step(file: Path, step: int | None, most: int) -> tuple[int, list[MetricRecord]]:
    """Return the last records of a metrics log that are not before a step, and that step.

    Args:
        file: the metrics log.
        step: the step; None: that of the last record.
        most: how many to return at most.
    """
    found: list[MetricRecord] = []
    for fields in read_jsonl_backwards(file):
        record = _to_metric_record(fields)
        if record is None:
            continue
        step = record[0] if step is None else step
        if record[0] < step or len(found) >= most:
            break
        found.append(record)
    return step or 0, found[::-1]


def _to_metric_record(fields: Any) -> MetricRecord | None:
    """Return a line of a metrics log as it was logged; None if it is not one."""
    is_record = isinstance(fields, Mapping) and fields.get("v") == VERSION
    if not is_record or find_metric_problem(fields) is not None:
        return None
    step: Any = fields.get("step")
    seconds: Any = fields.get("time")
    if type(step) is not int or not is_finite_number(seconds):
        return None
    value: Any = fields["value"]
    if fields["kind"] == "scalar" and isinstance(value, str):
        value = float(value)  # "NaN", "Infinity"
    return step, fields.get("epoch"), seconds, fields["name"], fields["kind"], value
