"""The last and best value of each metric of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MetricSummary", "is_better_when_low", "parse_number", "summarize_metrics"]

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


def summarize_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, MetricSummary]:
    """Return a summary of each scalar metric, by name, in the order of their first values."""
    summaries: dict[str, MetricSummary] = {}
    for row in rows:
        if row.get("kind") != "scalar":
            continue
        value, step = parse_number(row.get("value")), row.get("step")
        summary = summaries.setdefault(str(row.get("name")), MetricSummary())
        summary.count += 1
        summary.last, summary.last_step = value, step
        if not math.isfinite(value):
            continue
        if summary.lowest is None or value < summary.lowest:
            summary.lowest, summary.lowest_step = value, step
        if summary.highest is None or value > summary.highest:
            summary.highest, summary.highest_step = value, step
    for name, summary in summaries.items():
        is_low_better = is_better_when_low(name)
        if is_low_better is not None:
            summary.best = summary.lowest if is_low_better else summary.highest
            summary.best_step = summary.lowest_step if is_low_better else summary.highest_step
    return summaries


def is_better_when_low(name: str) -> bool | None:
    """Return whether low values of a metric are better; None if its name does not say."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    low, high = (any(map(pattern.fullmatch, words)) for pattern in (_LOW, _HIGH))
    return low if low != high else None


def parse_number(value: Any) -> float:
    """Return a scalar of the metrics log, also "NaN", "Infinity" and "-Infinity", as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
