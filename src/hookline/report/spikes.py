"""Loss spikes as the report shows them: where, how high, which samples, and what was logged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from hookline.printable import printable
from hookline.runs.formatting import format_number
from hookline.runs.jsonl_reader import is_finite_number
from hookline.text_tables import join_some

__all__ = ["encode_spike"]

_MAX_SERIES = 60
_MAX_BATCHES = 16


def encode_spike(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `loss_spike` event: its title, rows of names and texts, and a table of values.

    The table has, for each series, the median before the spike, the value at it and the one
    farthest from that median after it. The series that changed most come first.
    """
    shown = {name: _show(event.get(name)) for name in ("loss", "z", "median", "deviation", "peak")}
    rows = [
        [
            "Loss",
            f"{shown['loss']}, from a median of {shown['median']} with a deviation of "
            f"{shown['deviation']} in the steps before (robust z-score {shown['z']})",
        ],
        ["Peak", f"{shown['peak']} at step {_show(event.get('peak_step'))}"],
        ["Samples", _describe_batches(event.get("batches"))],
    ]
    series, more = _compare(event)
    step = _show(event.get("step"))
    return {
        "title": f"Step {step}: loss {shown['loss']}, robust z-score {shown['z']}",
        "rows": rows,
        "values": series,
        "more": more,
    }


def _describe_batches(batches: Any) -> str:
    if not isinstance(batches, list) or not batches:
        return "not known"
    parts: list[str] = []
    for batch in batches[:_MAX_BATCHES]:
        if isinstance(batch, dict):
            indices: Any = batch.get("indices")
            known = isinstance(indices, list) and indices
            of = f": indices {join_some(indices, 40, 20)}" if known else ""
            loader = printable(batch.get("loader"), 60)
            parts.append(f"batch {_show(batch.get('batch_idx'))} of {loader}{of}")
    more = len(batches) - _MAX_BATCHES
    return "; ".join(parts) + (f"; and {more} more batches" if more > 0 else "")


def _compare(event: Mapping[str, Any]) -> tuple[list[list[str]], int]:
    """Return the rows of the table, and how many more series were logged around the spike."""
    values, step = event.get("values"), _number(event.get("step"))
    if not isinstance(values, dict) or step is None:
        return [], 0
    found: list[tuple[float, list[str]]] = []
    for name, points in values.items():
        pairs = [
            (at, value)
            for point in (points if isinstance(points, list) else ())
            if isinstance(point, list) and len(point) == 2
            if (at := _number(point[0])) is not None
            and (value := _number(point[1], finite=False)) is not None
        ]
        before = [value for at, value in pairs if at < step and math.isfinite(value)]
        after = [value for at, value in pairs if at >= step]
        if not after:
            continue
        center = median(before) if before else None
        farthest = max(after, key=lambda value: _distance(value, center))
        row = [printable(name, 200), *map(_show, (center, after[0], farthest))]
        found.append((_surprise(farthest, before, center), row))
    found.sort(key=lambda item: -item[0])
    return [row for _, row in found[:_MAX_SERIES]], max(0, len(found) - _MAX_SERIES)


def _distance(value: float, center: float | None) -> float:
    if not math.isfinite(value):
        return math.inf
    return abs(value - (center or 0.0))


def _surprise(value: float, before: list[float], center: float | None) -> float:
    """Return how far a value is from the median before, in median distances from it."""
    if center is None:
        return -1.0
    spread = median(abs(one - center) for one in before)
    return _distance(value, center) / max(spread, 1e-3 * abs(center), 1e-12)


def _number(value: Any, *, finite: bool = True) -> float | None:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") and not finite:
        return float(value)
    return float(value) if is_finite_number(value) else None


def _show(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and math.isfinite(value):
        value = float(f"{value:.4g}")
    return printable(format_number(value), 60)
