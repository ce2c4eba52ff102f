"""A tracker's own thread and its queue: training never waits for a tracker."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hookline.context import to_float
from hookline.masking import mask_known_values
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_file import VERSION, InvalidValue, MetricRecord
from hookline.runs.jsonl_reader import find_metric_problem, is_finite_number, read_jsonl_backwards
from hookline.trackers.protocol import RefusedValues, TrackedRun, TrackedValue, Tracker

log = logging.getLogger("hookline")

_MAX_FAILURES = 3  # in a row
_MAX_STEP = (1 << 63) - 1


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
        self._pid = os.getpid()
        self._is_over = False
        # A daemon: a tracker that never returns does not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"hookline-{name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many values have not been logged yet."""
        return self._queued - self._done

    def put(self, records: Sequence[MetricRecord]) -> None:
        """Give the tracker records of the run's metrics log."""
        if self.waiting + len(records) <= self._max_values:
            self._enqueue(self._log, records, count=len(records))
        elif os.getpid() == self._pid:
            if not self.dropped:
                log.warning(
                    "The tracker '%s' is too slow: values are dropped. The run's own record does "
                    "not depend on it.",
                    self.name,
                )
            self.dropped += len(records)

    def rewind(self, step: int, records: Sequence[MetricRecord]) -> None:
        """Let the tracker continue where the record ends now."""
        rewind: Any = getattr(self._tracker, "rewind", None)
        if rewind is not None:
            self._enqueue(lambda: rewind(step, self._convert(records)))

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

    def _log(self, records: Sequence[MetricRecord]) -> None:
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

    def _finish(self, status: str) -> None:
        self._is_over = True
        if self.ids is not None:  # it has started
            self._tracker.finish(status)

    def _convert(self, records: Sequence[MetricRecord]) -> list[TrackedValue]:
        return [_to_tracked_value(record, self._run.folder) for record in records]


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
