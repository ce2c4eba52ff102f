"""A tracker's own thread and its queue: training never waits for a tracker.

Up to where a tool has the run's record is kept in the run's folder: what it lacks after a crash is
read from the record and logged again.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hookline.context import to_float
from hookline.files import (
    file_limits,
    open_handle,
    open_regular_file,
    parse_json,
    read_regular_file,
)
from hookline.masking import mask_known_values
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_file import VERSION, InvalidValue, MetricRecord
from hookline.runs.jsonl_reader import find_metric_problem, is_finite_number, read_jsonl_backwards
from hookline.trackers.protocol import RefusedValues, TrackedRun, TrackedValue, Tracker

log = logging.getLogger("hookline")

_MAX_FAILURES = 3  # in a row
_BATCH = 1000  # records that are read at a time
_MAX_STEP = (1 << 63) - 1
_DIGITS = 20  # of a position: always as many, so that one write replaces the contents


class TrackerThread:
    """Calls a tracker's methods in a thread of its own.

    Up to `max_values` values wait for it; further ones are dropped and counted.

    Attributes:
        ids: those of the tool's run, once it has started.
        dropped: how many values it was too slow for.
        failed: for how many values it raised an error, or was disabled.
        problem: why it was disabled.
        has_started: set when it has started, or failed to.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, max_values: int) -> None:
        self.name = name
        self.ids: Mapping[str, Any] | None = None
        self.dropped = self.failed = 0
        self.problem: str | None = None
        self.has_started = threading.Event()
        self._tracker, self._run, self._max_values = tracker, run, max_values
        self._queue: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...], int]] = SimpleQueue()
        self._queued = self._done = 0  # values; each is counted by one thread only: no lock
        self._failures = 0  # in a row
        unsaved_seconds = float(getattr(tracker, "unsaved_seconds", 0.0))
        self._logged = _LoggedPosition(run.folder, name, unsaved_seconds)
        self._pid = os.getpid()
        self._is_over = False
        # A daemon: a tracker that never returns does not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"hookline-{name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many values have not been logged yet."""
        return self._queued - self._done

    def put(self, records: Sequence[MetricRecord], end: int) -> None:
        """Give the tracker records, which end at this position of the run's metrics log."""
        if self.waiting + len(records) <= self._max_values:
            self._enqueue(self._log, records, end, count=len(records))
        elif os.getpid() == self._pid:
            if not self.dropped:
                log.warning(
                    "The tracker '%s' is too slow: values are dropped. The run's own record does "
                    "not depend on it.",
                    self.name,
                )
            self.dropped += len(records)

    def catch_up(self, end: int) -> None:
        """Log what the tool lacks of the run's record, up to a position of the metrics log."""
        self._enqueue(self._log_lacking, end)

    def rewind(self, step: int, records: Sequence[MetricRecord], end: int) -> None:
        """Let the tracker continue where the record ends now, and log what it lacks."""
        self._enqueue(self._rewind, step, records, end)

    def log_checkpoint(self, path: Path, step: Any) -> None:
        """Tell the tracker that a checkpoint is complete, if it has a method for that."""
        method: Any = getattr(self._tracker, "log_checkpoint", None)
        if method is not None:
            self._enqueue(method, path, step)

    def finish(self, status: str) -> None:
        """Let the tracker end its run after the values so far, without waiting for it."""
        self._enqueue(self._finish, status)

    def join(self, until: float) -> bool:
        """Wait for the end of the thread, up to a time; return whether it has ended."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _enqueue(self, function: Callable[..., None], *arguments: Any, count: int = 0) -> None:
        if os.getpid() == self._pid:  # a forked process has a copy of the queue, and no thread
            self._queued += count
            self._queue.put((function, arguments, count))

    # -- in the tracker's thread ------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self.ids = dict(self._tracker.start(self._run) or {})
            if not getattr(self._tracker, "is_continued", True):
                self._logged.reset()
        except BaseException as error:
            self._disable("did not start", error)
        self.has_started.set()
        while not self._is_over:
            function, arguments, count = self._queue.get()
            if self.problem is not None and function != self._finish:
                self.failed += count
            else:
                self._try(function, *arguments, count=count)
            self._done += count

    def _try(self, function: Callable[..., None], *arguments: Any, count: int) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self.failed += count
            self._failures += 1
            if self.problem is not None:
                return  # it could not end either
            if self._failures >= _MAX_FAILURES:
                self._disable(f"failed {self._failures} times in a row and is disabled", error)
            elif self._failures == 1:
                log.exception("The tracker '%s' failed. Training continues.", self.name)
        else:
            self._failures = 0

    def _disable(self, what: str, error: BaseException) -> None:
        self.problem = f"{what} ({type(error).__name__}: {error})"
        log.error(
            "The tracker '%s' %s: %s: %s. Training continues, and the run's own record does not "
            "depend on it.",
            *(self.name, what, type(error).__name__, error),
            exc_info=error,
        )

    def _log(self, records: Sequence[MetricRecord], end: int) -> None:
        try:
            self._tracker.log(self._convert(records))
        except RefusedValues as refused:
            if refused.count >= len(records):
                raise refused.error from None
            if not self.failed:
                log.warning(
                    "The tracker '%s' has refused values: %s. The run's own record has them.",
                    *(self.name, refused),
                )
            self.failed += refused.count
        self._logged.advance(end)

    def _log_lacking(self, end: int) -> None:
        """Log what the tool lacks of the run's record, up to a position."""
        if self._run.folder is None or self._logged.value >= end:
            return
        file = self._run.folder / "metrics.jsonl"
        for lacking, position in _read_range(file, self._logged.value, end):
            if self.problem is not None:
                self.failed += len(lacking)
            else:
                self._try(self._log, lacking, position, count=len(lacking))

    def _rewind(self, step: int, records: Sequence[MetricRecord], end: int) -> None:
        self._log_lacking(end)
        self._logged.rewind(end)
        rewind: Any = getattr(self._tracker, "rewind", None)
        if rewind is not None:
            rewind(step, self._convert(records))

    def _finish(self, status: str) -> None:
        self._is_over = True
        if self.ids is not None:  # it has started
            self._tracker.finish(status)
            self._logged.save()

    def _convert(self, records: Sequence[MetricRecord]) -> list[TrackedValue]:
        return [_to_tracked_value(record, self._run.folder) for record in records]


class _LoggedPosition:
    """A position in `metrics.jsonl`, in bytes, kept in `trackers/<name>.txt` of the run's folder.

    It is only used in the tracker's thread. A file that cannot be written or read never fails: then
    values are logged twice.

    A position is written when it is older than `unsaved_seconds`: so long the tool itself keeps
    values in memory, which are lost when the process is killed.
    """

    def __init__(self, folder: Path | None, name: str, unsaved_seconds: float) -> None:
        file = re.sub(r"[^\w.-]", "_", name) + ".txt"
        self._file = None if folder is None else folder / "trackers" / file
        self._unsaved_seconds = unsaved_seconds
        self._unsaved: deque[tuple[float, int]] = deque()  # times and positions
        self.value = self._read()

    def advance(self, position: int) -> None:
        """Note that the tool got everything up to a position."""
        self.value = position
        now = time.monotonic()
        self._unsaved.append((now, position))
        saved: int | None = None
        while self._unsaved and now - self._unsaved[0][0] >= self._unsaved_seconds:
            saved = self._unsaved.popleft()[1]
        if saved is not None:
            self._write(saved)

    def rewind(self, position: int) -> None:
        """Note that the run's record ends at a position now, and that the tool has all of it."""
        self._unsaved.clear()
        self._write(min(self._read(), position))
        self.advance(position)

    def reset(self) -> None:
        """Note that the tool has nothing of the run."""
        self.value = 0
        self.save()

    def save(self) -> None:
        """Write the position: the tool has saved everything."""
        self._unsaved.clear()
        self._write(self.value)

    def _read(self) -> int:
        if self._file is not None:
            with suppress(OSError, ValueError):
                return max(0, int(read_regular_file(self._file, _DIGITS + 1)))
        return 0

    def _write(self, position: int) -> None:
        if self._file is None:
            return
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            handle = open_handle(self._file, os.O_WRONLY | os.O_CREAT)
            try:
                os.pwrite(handle, b"%0*d\n" % (_DIGITS, position), 0)
            finally:
                os.close(handle)


# -- the run's record -----------------------------------------------------------------------------


def _to_tracked_value(record: MetricRecord, folder: Path | None) -> TrackedValue:
    """Return a record as trackers get it: with a name and a step, and scalars as floats."""
    step, _, seconds, name, kind, value = record
    if type(value) is InvalidValue:
        text: Any = value.text
        kind, value = "text", text
    if kind == "scalar":
        value = to_float(value)
    elif kind == "text":
        value = mask_known_values(to_jsonable(str(value)))
    elif kind == "image":
        value = (folder or Path()) / str(record[5]["path"])
    name = name if type(name) is str else str(to_jsonable(name))
    # The tools store integers of 64 bits.
    step = max(-_MAX_STEP, min(_MAX_STEP, step)) if type(step) is int else 0
    return TrackedValue(step, to_jsonable(name) or "_", kind, value, seconds)


def _read_range(file: Path, start: int, end: int) -> Iterator[tuple[list[MetricRecord], int]]:
    """Yield the records between two positions of a metrics log, and the position behind them."""
    records: list[MetricRecord] = []
    with open_regular_file(file) as lines:
        position = lines.seek(start)
        while position < end and (line := lines.readline(file_limits.line_bytes)):
            position += len(line)
            with suppress(ValueError):
                if (record := _to_metric_record(parse_json(line))) is not None:
                    records.append(record)
            if len(records) == _BATCH:
                yield records, position
                records = []
    if records:
        yield records, position


def read_from_step(file: Path, step: int | None, most: int) -> tuple[int, list[MetricRecord]]:
    """Return the last records of a metrics log that are not before a step, and that step."""
    found: list[MetricRecord] = []
    for fields in read_jsonl_backwards(file):
        record = _to_metric_record(fields)
        if record is None:
            continue
        step = record[0] if step is None else step
        if record[0] < step or len(found) >= most:
            break
        found.append(record)
    return step or 0, found[::-1]


def _to_metric_record(fields: Any) -> MetricRecord | None:
    """Return a line of a metrics log as it was logged; None if it is not one."""
    is_record = isinstance(fields, Mapping) and fields.get("v") == VERSION
    if not is_record or find_metric_problem(fields) is not None:
        return None
    step: Any = fields.get("step")
    seconds: Any = fields.get("time")
    if type(step) is not int or not is_finite_number(seconds):
        return None
    value: Any = fields["value"]
    if fields["kind"] == "scalar" and isinstance(value, str):
        value = float(value)  # "NaN", "Infinity"
    return step, fields.get("epoch"), seconds, fields["name"], fields["kind"], value
