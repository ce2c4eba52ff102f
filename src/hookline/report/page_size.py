"""The size of a page: the largest parts of its data are halved until it is small enough."""

from __future__ import annotations

from typing import Any

from hookline.printable import printable
from hookline.report.page_data import to_script_json

__all__ = ["MAX_PAGE_BYTES", "fit_page"]

MAX_PAGE_BYTES = 9_900_000
_MIN_PART = 10_000  # bytes; smaller ones are left alone


def fit_page(data: dict[str, Any], room: int) -> None:
    """Halve the largest parts of the encoded runs until they have at most `room` bytes as JSON.

    What was left out is added to the facts of each run. Runs seldom need it: every part has limits
    of its own, which a strange run may reach in all of them at once.
    """
    parts = [
        (owner, name, run)
        for run in [data, *data["runs"]]
        for owner in (run, run.get("media", {}))
        for name in owner
        if isinstance(owner[name], dict | list) and name not in ("runs", "facts", "media", "xs")
    ]
    sizes = [_size(owner[name]) for owner, name, _ in parts]
    total = _size(data)
    while total > room and max(sizes) > _MIN_PART:
        largest = sizes.index(max(sizes))
        owner, name, run = parts[largest]
        part: Any = owner[name]
        kept = len(part) // 2
        note = f"{len(part) - kept:,} of {len(part):,} {name}: the page would be too large"
        owner[name] = dict([*part.items()][:kept]) if isinstance(part, dict) else part[:kept]
        size = _size(owner[name])
        total, sizes[largest] = total - sizes[largest] + size, size
        for one in [run] if "facts" in run else data["runs"]:
            one["facts"]["left_out"].append(printable(note))


def _size(value: Any) -> int:
    return len(to_script_json(value))
