"""Sampling: a long series in a bounded number of buckets, each with its mean, minimum and maximum.

A bucket has the same number of values as every other one of its series. When there are too many
buckets, neighbours are merged in pairs, so no extreme is ever lost, and memory is bounded.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from typing import Any

from hookline.runs.metric_values import MetricSummary, Scalar, is_better_when_low

_MAX_NOT_FINITE = 100  # steps that are kept


class SampledSeries:
    """The values of one metric, sampled. Values that are not finite are counted apart.

    A bucket has the step and the time of its last value.
    """

    __slots__ = (
        *("counts", "highest", "highest_step", "highs", "last", "last_step", "lowest"),
        *("lowest_step", "lows", "not_finite", "not_finite_steps", "steps", "sums", "times"),
        *("total", "width"),
    )

    def __init__(self) -> None:
        self.steps, self.times = array("d"), array("d")
        self.sums, self.lows, self.highs = array("d"), array("d"), array("d")
        self.counts = array("q")
        self.width = 1  # values in a bucket
        self.total = self.not_finite = 0
        self.not_finite_steps: list[float] = []
        self.last = self.last_step = math.nan
        self.lowest, self.highest = math.inf, -math.inf
        self.lowest_step = self.highest_step = math.nan

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, rows: Sequence[Scalar], limit: int) -> None:
        """Add values in the order of the log, and merge buckets if there are more than `limit`."""
        values = [float(row[4]) for row in rows]
        self.total += len(values)
        self.last, self.last_step = values[-1], _number(rows[-1][0])
        if not math.isfinite(sum(values)):
            rows, values = self._drop_not_finite(rows, values)
        i = 0
        while i < len(values):
            open_count = self.counts[-1] if self.counts else self.width
            is_open = open_count < self.width
            end = min(len(values), i + (self.width - open_count if is_open else self.width))
            self._add_bucket(rows, values[i:end], i, end, is_open)
            i = end
            if len(self.counts) > limit:
                self.merge_pairs()

    def _add_bucket(
        self, rows: Sequence[Scalar], values: list[float], start: int, end: int, is_open: bool
    ) -> None:
        low, high = (values[0], values[0]) if len(values) == 1 else (min(values), max(values))
        if low < self.lowest:
            self.lowest, self.lowest_step = low, _number(rows[start + values.index(low)][0])
        if high > self.highest:
            self.highest, self.highest_step = high, _number(rows[start + values.index(high)][0])
        step, seconds = _number(rows[end - 1][0]), _number(rows[end - 1][2])
        if is_open:
            self.steps[-1], self.times[-1] = step, seconds
            self.sums[-1] += sum(values)
            self.lows[-1], self.highs[-1] = min(self.lows[-1], low), max(self.highs[-1], high)
            self.counts[-1] += len(values)
            return
        self.steps.append(step)
        self.times.append(seconds)
        self.sums.append(sum(values))
        self.lows.append(low)
        self.highs.append(high)
        self.counts.append(len(values))

    def _drop_not_finite(
        self, rows: Sequence[Scalar], values: list[float]
    ) -> tuple[list[Scalar], list[float]]:
        kept = [i for i, value in enumerate(values) if math.isfinite(value)]
        if len(kept) < len(values):
            self.not_finite += len(values) - len(kept)
            room = _MAX_NOT_FINITE - len(self.not_finite_steps)
            odd = (i for i, value in enumerate(values) if not math.isfinite(value))
            steps = [_number(rows[i][0]) for i, _ in zip(odd, range(room), strict=False)]
            self.not_finite_steps += steps
        return [rows[i] for i in kept], [values[i] for i in kept]

    def merge_pairs(self) -> None:
        """Halve the number of buckets."""
        is_odd = len(self.counts) % 2  # the last one waits for a neighbour
        last: list[Any] = [column.pop() for column in self._columns()] if is_odd else []
        self.steps, self.times = self.steps[1::2], self.times[1::2]
        self.sums = array("d", map(float.__add__, self.sums[::2], self.sums[1::2]))
        self.lows = array("d", map(min, self.lows[::2], self.lows[1::2]))
        self.highs = array("d", map(max, self.highs[::2], self.highs[1::2]))
        self.counts = array("q", map(int.__add__, self.counts[::2], self.counts[1::2]))
        self.width *= 2
        for column, value in zip(self._columns(), last, strict=False):
            column.append(value)

    def shrink(self, limit: int) -> None:
        """Merge buckets until there are at most `limit`."""
        while len(self.counts) > max(limit, 2):
            self.merge_pairs()

    def _columns(self) -> tuple[array[Any], ...]:
        return self.steps, self.times, self.sums, self.lows, self.highs, self.counts

    @property
    def means(self) -> list[float]:
        """The mean of each bucket."""
        return [total / count for total, count in zip(self.sums, self.counts, strict=True)]

    def summary(self, name: str) -> MetricSummary:
        """Return the last and best values of the metric of this name."""
        summary = MetricSummary(self.total, self.last, _whole(self.last_step))
        if self.lowest <= self.highest:
            summary.lowest, summary.lowest_step = self.lowest, _whole(self.lowest_step)
            summary.highest, summary.highest_step = self.highest, _whole(self.highest_step)
            is_low_better = is_better_when_low(name)
            if is_low_better is not None:
                side = "lowest" if is_low_better else "highest"
                summary.best = getattr(summary, side)
                summary.best_step = getattr(summary, f"{side}_step")
        return summary


def _number(text: bytes) -> float:
    """Return a number of JSON; NaN for null."""
    try:
        return float(text)
    except ValueError:
        return math.nan if json.loads(text) is None else 0.0


def _whole(step: float) -> float | int | None:
    if not math.isfinite(step):
        return None
    return int(step) if step == int(step) else step
