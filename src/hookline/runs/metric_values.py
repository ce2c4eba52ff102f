"""The values of a metrics log: rows of chosen metrics, and the last and best value of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from hookline.runs.jsonl_reader import JsonlReader

_LOW = re.compile(r"loss|error|perplexity|ppl|mae|mse|rmse|wer|cer|nll|bits|divergence")
_HIGH = re.compile(
    r"acc|accuracy|auc|auroc|bleu|f1|iou|map|precision|psnr|r2|recall|reward|rouge|score|ssim|top\d"
)
_MAX_NAMES = 10_000  # that are remembered

COLUMNS = ("step", "epoch", "time", "name", "kind", "value")

Row = dict[str, Any]


def read_rows(reader: JsonlReader, patterns: Sequence[str]) -> Iterator[Row]:
    """Yield the records whose name matches a glob, in their order; without patterns, all.

    The JSON of a record has its name as it is, in quotes, or has a backslash. So lines are searched
    for both, and only those with one of them are parsed.
    """
    begins = [re.split(r"[*?[]", pattern, maxsplit=1) for pattern in patterns]
    needles = [f'"{begin}{"" if rest else chr(34)}' for begin, *rest in begins]
    named = [re.escape(needle.encode("utf-8", "replace")) for needle in needles]
    may_match = re.compile(b"|".join([*named, rb"\\"]) if patterns else b"").search

    @lru_cache(_MAX_NAMES)
    def is_wanted(name: str) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    for block in reader.blocks():
        for line in block[:-1].split(b"\n"):
            if not may_match(line):
                reader.skip(1)
            elif (record := reader.parse(line)) is not None and is_wanted(record["name"]):
                yield _to_row(record)


def _to_row(record: Mapping[str, Any]) -> Row:
    row = {name: record.get(name) for name in COLUMNS}
    if row["kind"] == "scalar" and isinstance(row["value"], str):
        row["value"] = float(row["value"])  # "NaN", "Infinity" or "-Infinity"
    return row | ({"was": record["was"]} if "was" in record else {})


# -- the last and best values ---------------------------------------------------------------------


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

    def choose_best(self, name: str) -> MetricSummary:
        """Set the best value of the metric of this name, if the name says which is better."""
        is_low_better = is_better_when_low(name)
        if is_low_better is not None:
            low, high = (self.lowest, self.lowest_step), (self.highest, self.highest_step)
            self.best, self.best_step = low if is_low_better else high
        return self


def summarize_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, MetricSummary]:
    """Return a summary of each scalar metric, by name, in the order of their first values."""
    summaries: dict[str, MetricSummary] = {}
    for record in records:
        if record["kind"] != "scalar":
            continue
        name, step, value = record["name"], record.get("step"), float(record["value"])
        one = summaries.get(name)
        if one is None:
            one = summaries[name] = MetricSummary()
        one.count += 1
        one.last, one.last_step = value, step
        if not math.isfinite(value):
            continue
        if one.lowest is None or value < one.lowest:
            one.lowest, one.lowest_step = value, step
        if one.highest is None or value > one.highest:
            one.highest, one.highest_step = value, step
    return {name: summary.choose_best(name) for name, summary in summaries.items()}


def is_better_when_low(name: str) -> bool | None:
    """Return whether low values of a metric are better; None if its name does not say."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    low, high = (any(map(pattern.fullmatch, words)) for pattern in (_LOW, _HIGH))
    return low if low != high else None
