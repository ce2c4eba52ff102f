"""What came of a run: the last and the best value of each metric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Result", "is_better_when_low", "number_of", "results_of"]

_LOW = re.compile(r"loss|error|perplexity|ppl|mae|mse|rmse|wer|cer|nll|bits|divergence")
_HIGH = re.compile(
    r"acc|accuracy|auc|auroc|bleu|f1|iou|map|precision|psnr|r2|recall|reward|rouge|score|ssim|top\d"
)


@dataclass
class Result:
    """The values of one metric.

    `best` is the lowest or the highest one where the name tells which is meant (`val/loss`,
    `val/accuracy`), else None. Values that are not finite are never the lowest or highest.
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


def results_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Result]:
    """Return the result of each scalar metric, by name, in the order of their first values."""
    results: dict[str, Result] = {}
    for row in rows:
        if row.get("kind") != "scalar":
            continue
        value, step = number_of(row.get("value")), row.get("step")
        result = results.setdefault(str(row.get("name")), Result())
        result.count += 1
        result.last, result.last_step = value, step
        if not math.isfinite(value):
            continue
        if result.lowest is None or value < result.lowest:
            result.lowest, result.lowest_step = value, step
        if result.highest is None or value > result.highest:
            result.highest, result.highest_step = value, step
    for name, result in results.items():
        low = is_better_when_low(name)
        if low is not None:
            result.best = result.lowest if low else result.highest
            result.best_step = result.lowest_step if low else result.highest_step
    return results


def is_better_when_low(name: str) -> bool | None:
    """Whether a metric of this name is to become small, or large; None: the name does not tell."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    low, high = (any(map(meant.fullmatch, words)) for meant in (_LOW, _HIGH))
    return low if low != high else None


def number_of(value: Any) -> float:
    """Return a recorded scalar: "NaN", "Infinity" and "-Infinity" stand for what JSON lacks."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
