"""Rewinding a run's metrics log to where it stood when a checkpoint was saved.

What the log has behind that position is moved to `repeated.jsonl`, since it will be trained again.
Each rewind is first written to the manifest, so that one that was interrupted is completed later.
A rewind has these fields, in bytes:

- `metrics`: the size that the log is cut to.
- `end`: the size that it had before.
- `repeated`: where in `repeated.jsonl` the bytes between the two are.
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

from hookline.arguments import show_value
from hookline.errors import RunError
from hookline.files.limits import file_limits
from hookline.files.regular_files import open_regular_file
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
    """Return the rewind that brings the log to a position; None if there is nothing to do.

    If an earlier rewind has moved records before the position, because the run was resumed
    from an earlier checkpoint meanwhile, the log is cut to what is still there.
    """
    if (
        not isinstance(position, Mapping)
        or not all(type(size) is int and size >= 0 for size in position.values())
        or not {"metrics", "step"} & {*position}
    ):
        raise RunError(
            f"The log {metrics.path} cannot continue at {show_value(position)}: expected "
            "'metrics' and 'rewinds', or 'step', as integers of 0 or more."
        )
    end = metrics.size
    if "metrics" in position:
        later = [rewind["metrics"] for rewind in rewinds[position.get("rewinds", 0) :]]
        wanted = position["metrics"]
        kept = min([wanted, *later])
    else:
        wanted = kept = _end_of_step(metrics.path, position["step"])
    if kept > end:
        _report_missing(metrics, kept)
        return None
    if kept < wanted:
        log.warning(
            "Records of steps before the checkpoint are in %s, and not in %s: the run was resumed "
            "from an earlier checkpoint meanwhile.",
            *(REPEATED, metrics.path),
        )
    if kept == end:
        return None
    _check_lines(metrics, kept, end)
    repeated = _size_of_lines(metrics.path.with_name(REPEATED))
    return {"metrics": kept, "end": end, "repeated": repeated}


def _report_missing(file: JsonlFile, wanted: int) -> None:
    log.error(
        "%s has %d bytes, but %d when the checkpoint was saved: records before the checkpoint are "
        "missing. The file is continued as it is.",
        *(file.path, file.size, wanted),
    )


def _size_of_lines(file: Path) -> int:
    """Return where the next line of a file begins: behind a line feed, also a missing one."""
    try:
        with open_regular_file(file) as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - 1))
            return size + (size > 0 and lines.read(1) != b"\n")
    except FileNotFoundError:
        return 0


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


def finish_rewind(metrics: JsonlFile, rewind: Rewind) -> None:
    """Carry out a rewind, also again, before anything is appended to the log."""
    if metrics.size == rewind["end"]:  # otherwise the log was cut, after the copy was complete
        _check_lines(metrics, rewind["metrics"], rewind["end"])
        target = metrics.path.with_name(REPEATED)
        _move_end(metrics, rewind["metrics"], target, rewind["repeated"])


def move_end(file: JsonlFile, size: int, target: Path) -> None:
    """Move what a file has behind a position to the end of another file."""
    if type(size) is not int or size < 0:
        raise RunError(f"{file.path} cannot continue at {size}: expected a number of bytes.")
    if file.size < size:
        _report_missing(file, size)
    elif file.size > size:
        _move_end(file, size, target, _size_of_lines(target))


def _move_end(file: JsonlFile, size: int, target: Path, start: int) -> None:
    """Move the end of a file to a position of another file, which is cut there."""
    start = min(start, _size_of_lines(target))
    moved = JsonlFile(target)
    try:
        moved.truncate(min(start, moved.size))
        moved.extend([b"\n" * (start - moved.size)])
        moved.extend(_chunks(file, size, file.size))
    finally:
        moved.close()
    file.truncate(size)


def _check_lines(file: JsonlFile, start: int, end: int) -> None:
    """Raise OSError if a line is longer than allowed: a file may have gigabytes without data."""
    length = 0
    for chunk in _chunks(file, start, end):
        length = len(chunk) - chunk.rfind(b"\n") - 1 if b"\n" in chunk else length + len(chunk)
        if length > file_limits.line_bytes:
            raise OSError(
                f"{file.path.name} has a line of more than {file_limits.line_bytes:,} bytes; "
                "hookline.file_limits allows more"
            )


def _chunks(file: JsonlFile, start: int, end: int) -> Iterator[bytes]:
    return (file.read(at, min(_CHUNK, end - at)) for at in range(start, end, _CHUNK))
