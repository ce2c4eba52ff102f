"""The last and best value of each metric of a run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from hookline.runs.jsonl_reader import JsonlReader
from hookline.runs.scalar_lines import read_scalars

__all__ = [
    "MetricSummary",
    "is_better_when_low",
    "summarize_metrics",
]

_LOW = re.compile(r"loss|error|perplexity|ppl|mae|mse|rmse|wer|cer|nll|bits|divergence")
_HIGH = re.compile(
    r"acc|accuracy|auc|auroc|bleu|f1|iou|map|precision|psnr|r2|recall|reward|rouge|score|ssim|top\d"
)


@dataclass
class MetricSummary:
    """A summary of the values of one metric.

    `best` is the lowest or highest value if the name says which is better (`val/loss`,
    `val/accuracy`), otherwise None. Values that are not finite are never the lowest or highest.
    """

    count: int = 0
    last: float = math.nan
    last_step: Any = None
    lowest: float | None = None
    lowest_step: Any = None
    highest: float | None = None
    highest_step: Any = None
    best: float | None = None
    best_step: Any = None


class _Accumulator:
    __slots__ = ("count", "highest", "highest_step", "last", "last_step", "lowest", "lowest_step")

    def __init__(self) -> None:
        self.count = 0
        self.last = math.nan
        self.lowest, self.highest = math.inf, -math.inf
        self.last_step = self.lowest_step = self.highest_step = b"null"  # decoded at the end

    def summary(self, name: str) -> MetricSummary:
        summary = MetricSummary(self.count, self.last, json.loads(self.last_step))
        if self.lowest <= self.highest:  # there were finite values
            summary.lowest, summary.lowest_step = self.lowest, json.loads(self.lowest_step)
            summary.highest, summary.highest_step = self.highest, json.loads(self.highest_step)
            is_low_better = is_better_when_low(name)
            if is_low_better is not None:
                summary.best = summary.lowest if is_low_better else summary.highest
                summary.best_step = summary.lowest_step if is_low_better else summary.highest_step
        return summary


def summarize_metrics(reader: JsonlReader) -> dict[str, MetricSummary]:
    """Return a summary of each scalar metric, by name, in the order of their first values.

    Args:
        reader: The metrics log.
    """
    accumulators: dict[str, _Accumulator] = {}
    by_encoded_name: dict[bytes, _Accumulator] = {}
    for _, scalars in read_scalars(reader):
        for step, _, encoded_name, number in scalars:
            metric = by_encoded_name.get(encoded_name)
            if metric is None:
                metric = accumulators.setdefault(json.loads(encoded_name), _Accumulator())
                by_encoded_name[encoded_name] = metric
            value = float(number)
            metric.count += 1
            metric.last, metric.last_step = value, step
            if value < metric.lowest and value != -math.inf:  # never true for NaN
                metric.lowest, metric.lowest_step = value, step
            if value > metric.highest and value != math.inf:
                metric.highest, metric.highest_step = value, step
    return {name: metric.summary(name) for name, metric in accumulators.items()}


def is_better_when_low(name: str) -> bool | None:
    """Return whether low values of a metric are better; None if its name does not say."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    low, high = (any(map(pattern.fullmatch, words)) for pattern in (_LOW, _HIGH))
    return low if low != high else None
