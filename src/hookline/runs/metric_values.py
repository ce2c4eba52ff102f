"""The values of a metrics log, read in blocks: a run may have millions of them.

Usual lines are read with a pattern: parsing JSON takes several times as long. Lines that cannot
have a wanted name are not parsed at all: only their bytes are searched.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from hookline.runs.jsonl_reader import JsonlReader

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

_LOW = re.compile(r"loss|error|perplexity|ppl|mae|mse|rmse|wer|cer|nll|bits|divergence")
_HIGH = re.compile(
    r"acc|accuracy|auc|auroc|bleu|f1|iou|map|precision|psnr|r2|recall|reward|rouge|score|ssim|top\d"
)
_MAX_NAMES = 10_000  # that are remembered

COLUMNS = ("step", "epoch", "time", "name", "kind", "value")

Row = dict[str, Any]
Scalar = tuple[bytes, bytes, bytes, bytes]


def read_scalars(
    reader: JsonlReader, on_other: Callable[[dict[str, Any]], object] = id
) -> Iterator[tuple[int, list[Scalar]]]:
    """Yield the size of each block of lines, and its scalars: step, time, name, value, as JSON.

    A value is a number, `NaN`, `Infinity` or `-Infinity`, all of which `float` reads.
    `on_other` is called with each record of another kind.
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
    reader: JsonlReader, line: bytes, on_other: Callable[[dict[str, Any]], object]
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
        on_other(record)
        return None
    fields = (json.dumps(record.get(field)).encode() for field in ("step", "time", "name"))
    step, seconds, name = fields
    return step, seconds, name, repr(float(record["value"])).encode()


def read_rows(
    reader: JsonlReader, patterns: Sequence[str], found: list[int] | None = None
) -> Iterator[Row]:
    """Yield the records whose name matches a glob, in their order; without patterns, all.

    The JSON of a record has its name as it is, in quotes, or has a backslash. So lines are searched
    for both, and only those with one of them are parsed. `found` gets where each of these begins.
    """
    begins = [re.split(r"[*?[]", pattern, maxsplit=1) for pattern in patterns]
    needles = [f'"{begin}{"" if rest else chr(34)}' for begin, *rest in begins]
    named = b"|".join(re.escape(needle.encode("utf-8", "replace")) for needle in needles)
    plain = re.compile(named or rb"^(?!\Z)", re.MULTILINE)  # without patterns, every line
    careful = re.compile(named + rb"|\\") if patterns else plain

    @lru_cache(_MAX_NAMES)
    def is_wanted(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    position = 0
    for block in reader.blocks():
        end = 0
        for match in (careful if b"\\" in block else plain).finditer(block):
            if match.start() < end:
                continue  # in the same line
            begin = block.rfind(b"\n", 0, match.start()) + 1
            end = block.index(b"\n", match.start()) + 1
            if found is not None:
                found.append(position + begin)
            row = parse_row(reader, block[begin : end - 1])
            if row is not None and (not patterns or is_wanted(row["name"])):
                yield row
        position += len(block)


def parse_row(reader: JsonlReader, line: bytes) -> Row | None:
    """Return the row of a line; None if it is damaged."""
    match = _SCALAR_LINE.fullmatch(line)
    if match is not None and _is_utf8(line):
        step, seconds, name, value = match.groups()
        epoch = line[match.end(1) : match.start(2)].split(b'"')[2].strip(b" :,")
        return {
            "step": int(step),
            "epoch": None if epoch == b"null" else int(epoch),
            "time": float(seconds),
            "name": name[1:-1].decode(),
            "kind": "scalar",
            "value": int(value) if value.lstrip(b"-").isdigit() else float(value),
        }
    record = reader.parse(line)
    if record is None:
        return None
    row = {name: record.get(name) for name in COLUMNS}
    if row["kind"] == "scalar" and isinstance(row["value"], str):
        row["value"] = float(row["value"])  # "NaN", "Infinity" or "-Infinity"
    return row | ({"was": record["was"]} if "was" in record else {})


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


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


def summarize_metrics(reader: JsonlReader) -> dict[str, MetricSummary]:
    """Return a summary of each scalar metric, by name, in the order of their first values."""
    summaries: dict[str, Any] = {}  # steps are decoded at the end
    by_encoded_name: dict[bytes, Any] = {}
    for _, scalars in read_scalars(reader):
        for step, _, encoded_name, number in scalars:
            metric = by_encoded_name.get(encoded_name)
            if metric is None:
                new = MetricSummary(lowest=math.inf, highest=-math.inf)
                metric = summaries.setdefault(json.loads(encoded_name), new)
                by_encoded_name[encoded_name] = metric
            value = float(number)
            metric.count += 1
            metric.last, metric.last_step = value, step
            if value < metric.lowest and value != -math.inf:  # never true for NaN
                metric.lowest, metric.lowest_step = value, step
            if value > metric.highest and value != math.inf:
                metric.highest, metric.highest_step = value, step
    return {name: _complete(name, summary) for name, summary in summaries.items()}


def _complete(name: str, summary: MetricSummary) -> MetricSummary:
    """Decode the steps of a summary, and choose the best value."""
    if summary.lowest == math.inf:  # there were no finite values
        return MetricSummary(summary.count, summary.last, json.loads(summary.last_step))
    for field in ("last_step", "lowest_step", "highest_step"):
        setattr(summary, field, json.loads(getattr(summary, field)))
    return summary.choose_best(name)


def is_better_when_low(name: str) -> bool | None:
    """Return whether low values of a metric are better; None if its name does not say."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    low, high = (any(map(pattern.fullmatch, words)) for pattern in (_LOW, _HIGH))
    return low if low != high else None
