"""Series of a report: sampled in a bounded number of buckets, and grouped by layers.

A bucket has the mean, minimum and maximum of its values. It has as many values as every
other one of its series. When there are too many
buckets, neighbours are merged in pairs, so no extreme is ever lost, and memory is bounded.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hookline.runs.metric_values import MetricSummary

_MAX_NOT_FINITE = 100  # steps that are kept
_OTHER_GROUPS = frozenset(
    ("train", "val", "eval", "lr", "momentum", "weight_decay", "time", "system", "profile", "ranks")
)
VANISHING, EXPLODING = 1e-7, 1e3  # norms, as GradientMonitor warns of them
VANISHING_SHARE, EXPLODING_SHARE = 1e-4, 1e4  # of the median layer, as gradient_flow marks them

Layers = dict[str, str]  # the series of each layer
Scalar = tuple[float | None, float | None, float]  # step, time, value


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
        values = [row[2] for row in rows]
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
        step, seconds = _number(rows[end - 1][0]), _number(rows[end - 1][1])
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
            summary.choose_best(name)
        return summary


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _whole(step: float) -> float | int | None:
    if not math.isfinite(step):
        return None
    return int(step) if step == int(step) else step


# -- layers: `<group>/<layer>/<measure>`, such as `gradients/blocks.0.fc.weight/norm` -------------


def group_layers(names: Iterable[str]) -> dict[str, dict[str, Layers]]:
    """Return the series of several layers, by group, measure and layer, in their order."""
    groups: dict[str, dict[str, Layers]] = {}
    for name in names:
        group, *middle = name.split("/")
        if group in _OTHER_GROUPS:
            continue
        if group == "grad_norm" and middle:  # `grad_norm/<layer>`
            middle.append("norm")
        if len(middle) >= 2 and middle[0] != "total":  # that of all layers together
            layer, measure = "/".join(middle[:-1]), middle[-1]
            groups.setdefault(group, {}).setdefault(measure, {})[layer] = name
    several = {
        group: {measure: layers for measure, layers in measures.items() if len(layers) > 1}
        for group, measures in groups.items()
    }
    return {group: measures for group, measures in several.items() if measures}


def order_layers(layers: Layers, parameter_names: Sequence[str]) -> tuple[Layers, str]:
    """Return the series of layers in the model's order and `model`, if the order is known.

    Otherwise return them as they are, in the order of their first values, and `record`.
    """
    places: dict[str, int] = {}  # of parameters, and of the modules that have them
    for i, name in enumerate(map(str, parameter_names)):
        for end in (j for j, letter in enumerate(f"{name}.") if letter == "."):
            places.setdefault(name[:end], i)
    if not layers.keys() <= places.keys():
        return layers, "record"
    return {name: layers[name] for name in sorted(layers, key=places.__getitem__)}, "model"


def find_gradient_norms(groups: Mapping[str, Mapping[str, Layers]]) -> tuple[str, Layers] | None:
    """Return the group with the norms of gradients, and their series; None if there is none."""
    for group in ("gradients", "grad_norm"):
        if "norm" in groups.get(group, {}):
            return group, groups[group]["norm"]
    return None


def find_bad_gradients(
    layers: Layers, series: Mapping[str, SampledSeries]
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return layers whose gradients vanish, explode, or are not finite: two norms, and a step.

    A layer's norm is the median of the last quarter of its finite values. It vanishes below 1e-7,
    or below 1e-4 of the median layer; it explodes above 1e3, or above 1e4 of the median layer. The
    step is the first one with a value that is not finite.
    """
    norms: dict[str, float] = {}
    for layer, name in layers.items():
        if means := series[name].means:
            norms[layer] = statistics.median(means[-max(1, len(means) // 4) :])
    typical = statistics.median(norms.values()) if norms else 0.0
    low = max(VANISHING, VANISHING_SHARE * typical)
    high = min(EXPLODING, EXPLODING_SHARE * typical) if typical else EXPLODING
    vanishing = {layer: norm for layer, norm in norms.items() if norm < low}
    exploding = {layer: norm for layer, norm in norms.items() if norm > high}
    first_steps = {
        layer: series[name].not_finite_steps[0]
        for layer, name in layers.items()
        if series[name].not_finite
    }
    return vanishing, exploding, first_steps
