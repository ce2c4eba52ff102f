"""Reading a run's files of records, damaged ones too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.runs.jsonl_file import VERSION

__all__ = ["Records", "from_the_end", "read_file"]

_BLOCK = 1 << 16


@dataclass
class Records:
    """The records of a file, and what is wrong with it."""

    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    damage: list[str] = field(default_factory=list[str])


def read_file(file: Path, *, growing: bool = False) -> Records:
    """Read all records of a file.

    Args:
        file: `metrics.jsonl` or `events.jsonl`.
        growing: somebody may be writing it, so that a last line without an end is no damage.
    """
    found = Records()
    torn: list[int] = []
    newer: set[Any] = set()
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                record = _record(line)
                if not line.endswith(b"\n"):
                    if not growing:
                        found.damage.append(f"{file.name}: its last line is cut off")
                elif record is None:
                    torn.append(number)
                elif not _is_known(record):
                    newer.add(record.get("v"))
                else:
                    found.records.append(record)
    except FileNotFoundError:
        found.damage.append(f"{file.name} is missing")
    except OSError as error:
        found.damage.append(f"{file.name} cannot be read: {error}")
    if torn:
        some = ", ".join(map(str, torn[:5])) + (" …" if len(torn) > 5 else "")
        found.damage.append(f"{file.name}: {len(torn)} lines cannot be read (line {some})")
    if newer:
        versions = ", ".join(sorted(map(str, newer)))
        found.damage.append(
            f"{file.name}: records of version {versions} were left out; this hookline reads up to "
            f"{VERSION}. Install a newer one: pip install -U hookline"
        )
    return found


def from_the_end(file: Path, most: int = 1 << 22) -> Iterator[dict[str, Any]]:
    """Yield a file's records, the last first, without reading more than is asked for.

    Args:
        file: `metrics.jsonl` or `events.jsonl`.
        most: how many bytes to look at; a run may have gigabytes.
    """
    try:
        with file.open("rb") as lines:
            end = place = lines.seek(0, 2)
            rest = b""
            while place > 0 and end - place < most:
                size = min(_BLOCK, place)
                place = lines.seek(place - size)
                whole = (lines.read(size) + rest).split(b"\n")
                rest = whole.pop(0)  # its beginning may stand in the block before
                for line in reversed(whole):
                    if (record := _record(line)) is not None and _is_known(record):
                        yield record
            if place == 0 and (record := _record(rest)) is not None and _is_known(record):
                yield record
    except OSError:
        return


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_known(record: dict[str, Any]) -> bool:
    version = record.get("v")
    return type(version) is int and version <= VERSION
