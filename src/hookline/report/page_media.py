"""Histograms, texts and images of a run: some of each, within limits."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hookline.files import read_regular_file
from hookline.runs.location import find_refused_folder

_MAX_NAMES = {"histogram": 40, "text": 20, "image": 20}
_MAX_HISTOGRAMS = 64  # of one name
_MAX_BINS = 1_000  # of a histogram that is read
_ROWS = 40  # bins that are shown
_MAX_TEXTS, _MAX_IMAGES = 5, 4  # of one name: the newest
_MAX_CHARACTERS, _MAX_LINES = 4_000, 60
_MAX_IMAGE_BYTES, _MAX_ALL_IMAGES = 300_000, 1_500_000
_MAX_PIXELS = 4_000_000
_PNG = b"\x89PNG\r\n\x1a\n"

Histogram = tuple[Sequence[float], Sequence[float]]  # counts, and one more edges


@dataclass
class _Values:
    """The values of one name that are kept, and how many there were."""

    total: int = 0
    stride: int = 1
    kept: deque[Any] = field(default_factory=deque[Any])


class Media:
    """Collects what a run recorded beside numbers, in bounded memory."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, _Values]] = {kind: {} for kind in _MAX_NAMES}
        self._left_out: dict[str, int] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Add a valid record of the metrics log that is not a number."""
        kind, name = record["kind"], record["name"]
        by_name = self._values.get(kind)
        if by_name is None:
            self._leave_out("values of an unknown kind")
            return
        if name not in by_name and len(by_name) >= _MAX_NAMES[kind]:
            self._leave_out(f"{kind}s of further names, after the first {_MAX_NAMES[kind]}")
            return
        value: Any = record["value"]
        if kind == "histogram" and (value := _read_histogram(value)) is None:
            self._leave_out("histograms without valid counts and edges")
            return
        values = by_name.setdefault(name, _Values())
        values.total += 1
        if kind == "histogram":
            _keep_spread(values, (record.get("step"), value))
            return
        limit = _MAX_TEXTS if kind == "text" else _MAX_IMAGES
        value = value[: _MAX_CHARACTERS + 1] if kind == "text" else value["path"]
        values.kept.append((record.get("step"), value))
        if len(values.kept) > limit:
            values.kept.popleft()

    def _leave_out(self, what: str) -> None:
        self._left_out[what] = self._left_out.get(what, 0) + 1

    def encode(self, folder: Path, share: float = 1.0) -> tuple[dict[str, Any], list[str]]:
        """Return what the page shows, and what was left out, one line each.

        `share` is the part of the page's images that this run, in its folder, may have.
        """
        encoded = {
            "histograms": {n: _encode_histograms(v) for n, v in self._values["histogram"].items()},
            "texts": {n: _encode_texts(v) for n, v in self._values["text"].items()},
            "images": self._encode_images(folder, int(share * _MAX_ALL_IMAGES)),
        }
        return encoded, [f"{count:,} {what}" for what, count in self._left_out.items()]

    def _encode_images(self, folder: Path, room: int) -> dict[str, Any]:
        refused = find_refused_folder(folder / "media")
        encoded: dict[str, Any] = {}
        for name, values in self._values["image"].items():
            items: list[list[Any]] = []
            for step, path in reversed(values.kept):
                if refused is not None:
                    self._leave_out(f"images: {refused}")
                    continue
                try:
                    image = check_png(read_regular_file(folder / path, _MAX_IMAGE_BYTES))
                except OSError as error:
                    self._leave_out(f"images that cannot be read, such as {path}: {error}")
                    continue
                except ValueError as error:
                    self._leave_out(f"images that are not shown, such as {path}: {error}")
                    continue
                if len(image) > room:
                    self._leave_out(f"images beyond {_MAX_ALL_IMAGES / 1e6:g} MB in all")
                    continue
                room -= len(image)
                items.insert(0, [step, base64.b64encode(image).decode()])
            encoded[name] = {"total": values.total, "items": items}
        return encoded


def _keep_spread(values: _Values, item: Any) -> None:
    """Keep some values that are spread over all, the newest always."""
    if values.kept and (values.total - 2) % values.stride:
        values.kept.pop()  # was kept because it was the newest
    values.kept.append(item)
    if len(values.kept) > _MAX_HISTOGRAMS:
        values.kept = deque([*values.kept][::2])
        values.stride *= 2


def _read_histogram(value: dict[str, Any]) -> Histogram | None:
    """Return the counts and edges of a histogram; None if they are not those of one."""
    try:
        counts, edges = array("d", value["counts"]), array("d", value["edges"])
    except (TypeError, OverflowError):
        return None
    is_valid = (
        0 < len(counts) <= _MAX_BINS
        and len(edges) == len(counts) + 1
        and all(count >= 0 for count in counts)
        and math.isfinite(sum(counts))
        and math.isfinite(edges[-1] - edges[0])
        and all(low < high for low, high in pairwise(edges))
    )
    return (counts, edges) if is_valid else None


def _encode_histograms(values: _Values) -> dict[str, Any]:
    """Return histograms over steps, with common edges: the share of the values in each bin."""
    spans = [_find_filled(histogram) for _, histogram in values.kept]
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    return {
        "total": values.total,
        "steps": [step for step, _ in values.kept],
        "edges": [float(f"{low + (high - low) * i / _ROWS:.6g}") for i in range(_ROWS + 1)],
        "columns": [_rebin(histogram, low, high) for _, histogram in values.kept],
    }


def _find_filled(histogram: Histogram) -> tuple[float, float]:
    """Return where the values of a histogram begin and end."""
    counts, edges = histogram
    filled = [i for i, count in enumerate(counts) if count] or [0, len(counts) - 1]
    return edges[filled[0]], edges[filled[-1] + 1]


def _rebin(histogram: Histogram, low: float, high: float) -> list[float | None]:
    """Return the share of the values in each of the shown bins; None where there are none."""
    counts, edges = histogram
    total, width = sum(counts) or 1.0, (high - low) / _ROWS
    shares = [0.0] * _ROWS
    for count, (begin, end) in zip(counts, pairwise(edges), strict=True):
        if not count:
            continue
        first, last = (min(_ROWS - 1, int((edge - low) / width)) for edge in (begin, end))
        for i in range(first, last + 1):
            begins, ends = low + i * width, low + (i + 1) * width
            part = (min(end, ends) - max(begin, begins)) / (end - begin)
            shares[i] += count / total * max(0.0, part)
    return [float(f"{share:.3g}") if share else None for share in shares]


def _encode_texts(values: _Values) -> dict[str, Any]:
    items: list[list[Any]] = []
    for step, text in values.kept:
        cut = text[:_MAX_CHARACTERS] + "…" if len(text) > _MAX_CHARACTERS else text
        lines = cut.split("\n")
        more = [f"… and {len(lines) - _MAX_LINES} more lines"] * (len(lines) > _MAX_LINES)
        items.append([step, "\n".join([*lines[:_MAX_LINES], *more])])
    return {"total": values.total, "items": items}


def check_png(data: bytes) -> bytes:
    """Return a PNG file from elsewhere; raise ValueError if it is none, or is very large."""
    if data[:8] != _PNG or data[12:16] != b"IHDR":
        raise ValueError("it is not a PNG file")
    width, height = struct.unpack(">II", data[16:24].ljust(8, b"\0"))
    if not 0 < width * height <= _MAX_PIXELS:
        raise ValueError(f"it has {width:,} × {height:,} pixels")
    return data
