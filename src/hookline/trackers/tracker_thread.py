"""A tracker's own thread and its queue: training never waits for a tracker."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from hookline.trackers.logged_position import LoggedPosition
from hookline.trackers.recorded_values import read_range, to_tracked_value
from hookline.trackers.refused_values import RefusedValues
from hookline.trackers.tracker import TrackedRun, TrackedValue, Tracker

__all__ = ["TrackerThread"]

log = logging.getLogger("hookline")

_MAX_FAILURES = 3  # in a row


class TrackerThread:
    """Calls a tracker's methods in a thread of its own.

    Args:
        name: the tracker's name.
        tracker: the tracker.
        run: what it gets when it starts.
        max_values: how many values may wait; further ones are dropped and counted.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, max_values: int) -> None:
        self.name = name
        self.ids: Mapping[str, Any] | None = None  # of the tool's run, once it has started
        self.dropped = 0  # values that it was too slow for
        self.failed = 0  # values that it raised an error for, or that came after it was disabled
        self.problem: str | None = None  # why it was disabled
        self.has_started = threading.Event()  # or failed to
        self._tracker, self._run, self._max_values = tracker, run, max_values
        self._queue: SimpleQueue[tuple[Callable[..., None], Any, int]] = SimpleQueue()
        self._given = self._done = 0  # each is counted by one thread only: no lock
        self._failures = 0  # in a row
        unsaved_seconds = float(getattr(tracker, "unsaved_seconds", 0.0))
        self._logged = LoggedPosition(run.folder, name, unsaved_seconds)
        self._pid = os.getpid()
        self._is_over = False
        # A daemon: a tracker that never returns does not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"hookline-{name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many values have not been logged yet."""
        return self._given - self._done

    def put(self, records: Sequence[tuple[Any, ...]], end: int) -> None:
        """Give the tracker records of the run, or drop them if too many wait already.

        Args:
            records: the records.
            end: the position behind them in the run's metrics log.
        """
        if os.getpid() != self._pid:  # a forked process has a copy of the queue, and no thread
            return
        if self.waiting + len(records) > self._max_values:
            if not self.dropped:
                log.warning(
                    "The tracker '%s' is too slow: values are dropped. The run's own record does "
                    "not depend on it.",
                    self.name,
                )
            self.dropped += len(records)
            return
        self._given += len(records)
        self._queue.put((self._log, (records, end), len(records)))

    def catch_up(self, end: int) -> None:
        """Log what the tool lacks of the run's record, up to a position of the metrics log."""
        if os.getpid() == self._pid:
            self._queue.put((self._log_lacking, end, 0))

    def rewind(self, step: int, records: Sequence[tuple[Any, ...]], end: int) -> None:
        """Let the tracker continue where the run's record ends now, and log what it lacks of it.

        Args:
            step: the step that the run continues from.
            records: the record's values from that step on.
            end: the position where the run's metrics log ends.
        """
        if os.getpid() == self._pid:
            self._queue.put((self._rewind, (step, records, end), 0))

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the tracker, if it has it, after the values so far."""
        if os.getpid() == self._pid and hasattr(self._tracker, method):
            self._queue.put((self._call, (method, arguments), 0))

    def finish(self, status: str) -> None:
        """Let the tracker end its run after the values so far, without waiting for it."""
        if os.getpid() == self._pid:
            self._queue.put((self._finish, status, 0))

    def join(self, until: float) -> bool:
        """Wait for the end of the thread, up to a time of `time.monotonic`; return whether it is.

        It ends after `finish`.
        """
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

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
            function, argument, count = self._queue.get()
            if self.problem is not None and function != self._finish:
                self.failed += count
            else:
                self._try(function, argument, count)
            self._done += count

    def _try(self, function: Callable[..., None], argument: Any, count: int) -> None:
        try:
            function(argument)
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

    def _log(self, given: tuple[Sequence[tuple[Any, ...]], int]) -> None:
        records, end = given
        try:
            self._tracker.log([self._read(record) for record in records])
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
        for lacking, position in read_range(file, self._logged.value, end):
            if self.problem is not None:
                self.failed += len(lacking)
            else:
                self._try(self._log, (lacking, position), len(lacking))

    def _rewind(self, given: tuple[int, Sequence[tuple[Any, ...]], int]) -> None:
        step, records, end = given
        self._log_lacking(end)
        self._logged.rewind(end)
        rewind: Any = getattr(self._tracker, "rewind", None)
        if rewind is not None:
            rewind(step, [self._read(record) for record in records])

    def _call(self, call: tuple[str, tuple[Any, ...]]) -> None:
        method, arguments = call
        getattr(self._tracker, method)(*arguments)

    def _finish(self, status: str) -> None:
        self._is_over = True
        if self.ids is not None:  # it has started
            self._tracker.finish(status)
            self._logged.save()

    def _read(self, record: tuple[Any, ...]) -> TrackedValue:
        return to_tracked_value(record, self._run.folder)
