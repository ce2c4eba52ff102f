"""Rewinding a run's metrics log to where it stood when a checkpoint was saved.

What the log has behind that position is moved to `repeated.jsonl`, since it will be trained again.
Each rewind is first written to the manifest, as a write-ahead log: `finish_rewind` completes one
that was interrupted at any point. A rewind has these fields, in bytes:

- `metrics`: the size that the log is cut to.
- `end`: the size that it had before.
- `repeated`: where in `repeated.jsonl` the bytes between the two are.
- `restored`: pieces of `repeated.jsonl`, each a start and a size, that are appended to the log: the
  checkpoint belongs to records that an earlier rewind had removed.
- `finished`: whether all of this was done.

A position is the size of the log, and how many rewinds there were before: wall times play no role.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.arguments import check_mapping, show_value
from hookline.errors import RunError
from hookline.files import file_limits, open_regular_file
from hookline.runs.jsonl_file import JsonlFile
from hookline.runs.jsonl_reader import JsonlReader

log = logging.getLogger("hookline")

REPEATED = "repeated.jsonl"
"""The file in a run's folder with the records of steps that were trained again."""

_STEP = re.compile(rb'^{"v": \d+, "step": (-?\d{1,18}), ')
_CHUNK = 1 << 20

Rewind = dict[str, Any]


def plan_rewind(
    metrics: JsonlFile, rewinds: Sequence[Rewind], position: Mapping[str, int]
) -> Rewind | None:
    """Return the rewind that brings the log to a position; None if there is nothing to do."""
    if isinstance(position, Mapping):
        position = check_mapping("The position", position)
    if (
        not isinstance(position, Mapping)
        or not all(type(size) is int and size >= 0 for size in position.values())
        or not position.keys() & {"metrics", "step"}
    ):
        raise RunError(
            f"The log {metrics.path} cannot continue at {show_value(position)}: expected "
            "'metrics' and 'rewinds', or 'step', as integers of 0 or more."
        )
    end = metrics.size
    if "metrics" in position:
        wanted = position["metrics"]
        kept, restored = _locate(wanted, rewinds[position.get("rewinds", 0) :])
    else:
        wanted = kept = _end_of_step(metrics.path, position["step"])
        restored = []
    repeated = _size_of_lines(metrics.path.with_name(REPEATED))
    if kept > end or any(start + count > repeated for start, count in restored):
        log.error(
            "%s has %d bytes, but %d when the checkpoint was saved: records before the checkpoint "
            "are missing. The log is continued as it is, and no records are moved to %s.",
            *(metrics.path, end, wanted, REPEATED),
        )
        return None
    if kept == end and not restored:
        return None
    _check_lines(metrics, kept, end - kept)
    return {"metrics": kept, "end": end, "repeated": repeated, "restored": restored}


def _size_of_lines(file: Path) -> int:
    """Return where the next line of a file begins: behind a line feed, also a missing one."""
    try:
        with open_regular_file(file) as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - 1))
            return size + (size > 0 and lines.read(1) != b"\n")
    except FileNotFoundError:
        return 0


def _locate(size: int, later: Sequence[Rewind]) -> tuple[int, list[list[int]]]:
    """Return how much of a log of this size is still there, and the pieces that were moved."""
    pieces: list[list[int]] = []
    for rewind in later:
        if rewind["metrics"] < size:
            pieces.insert(0, [rewind["repeated"], size - rewind["metrics"]])
            size = rewind["metrics"]
    return size, pieces


def _end_of_step(file: Path, step: int) -> int:
    """Return where the first record of a later step begins, or the size of the file."""
    position = 0
    for block in JsonlReader(file).blocks():
        for line in block.splitlines(keepends=True):
            found = _STEP.match(line)
            if found is not None and int(found[1]) > step:
                return position
            position += len(line)
    return position


def check_rewind(folder: Path, rewind: Rewind) -> None:
    """Raise OSError if a run has not as many repeated records as a rewind needs."""
    file = folder / REPEATED
    size = file.lstat().st_size if os.path.lexists(file) else 0
    needed = max(rewind["repeated"] - 1, sum(count for _, count in rewind["restored"]))
    if needed > size:
        raise OSError(
            f"{REPEATED} has {size} bytes, but the last entry of 'rewinds' in manifest.json needs "
            f"{needed}"
        )


def finish_rewind(metrics: JsonlFile, rewind: Rewind) -> None:
    """Carry out a rewind, or what is missing of it, before anything is appended to the log."""
    kept, end, start = rewind["metrics"], rewind["end"], rewind["repeated"]
    moved = end - kept
    restored = sum(count for _, count in rewind["restored"])
    _check_lines(metrics, kept, moved)
    check_rewind(metrics.path.parent, rewind)
    repeated = JsonlFile(metrics.path.with_name(REPEATED))
    try:
        if repeated.size < start + moved:  # not all is there yet; otherwise the log may be cut
            repeated.truncate(min(start, repeated.size))
            repeated.extend([b"\n" * (start - repeated.size)])
            repeated.extend(_chunks(metrics, kept, moved))
        is_moved = zip(_chunks(metrics, kept, moved), _chunks(repeated, start, moved), strict=True)
        if metrics.size == end and all(a == b for a, b in is_moved):
            metrics.truncate(kept)
        if metrics.size < kept + restored:
            metrics.truncate(min(kept, metrics.size))
            for piece, count in rewind["restored"]:
                metrics.extend(_chunks(repeated, piece, count))
    finally:
        repeated.close()


def _check_lines(file: JsonlFile, start: int, count: int) -> None:
    """Raise OSError if a line is longer than allowed: a file may have gigabytes without data."""
    length = 0
    for chunk in _chunks(file, start, count):
        length = len(chunk) - chunk.rfind(b"\n") - 1 if b"\n" in chunk else length + len(chunk)
        if length > file_limits.line_bytes:
            raise OSError(
                f"{file.path.name} has a line of more than {file_limits.line_bytes:,} bytes; "
                "hookline.file_limits allows more"
            )


def _chunks(file: JsonlFile, start: int, count: int) -> Iterator[bytes]:
    end = min(start + count, file.size)
    return (file.read(at, min(_CHUNK, end - at)) for at in range(start, end, _CHUNK))
