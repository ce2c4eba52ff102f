"""What a line of `metrics.jsonl` or `events.jsonl` may contain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hookline.files.plain_names import is_plain_name

__all__ = ["find_event_problem", "find_metric_problem", "is_finite_number", "is_media_path"]

_MAX_NAME = 10_000  # characters
_NUMBERS_AS_TEXT = ("NaN", "Infinity", "-Infinity")


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
    if kind == "scalar" and not is_finite_number(value) and value not in _NUMBERS_AS_TEXT:
        return "its 'value' is not a number that a float can hold"
    if kind == "text" and not isinstance(value, str):
        return "its 'value' is not a text"
    if kind == "histogram" and not _is_histogram(value):
        return "its 'value' is not a histogram"
    if kind == "image" and not (isinstance(value, dict) and is_media_path(value.get("path"))):
        return "its 'value' is not an image in the folder media"
    return None


def find_event_problem(record: Mapping[str, Any]) -> str | None:
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


def is_media_path(path: Any) -> bool:
    """Return whether a path names a file in a run's folder `media`."""
    return isinstance(path, str) and path[:6] == "media/" and is_plain_name(path[6:])


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= _MAX_NAME


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("counts"), list) and isinstance(value.get("edges"), list)
