"""The trackers of a loop: started with its run, fed with its record, and ended with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hookline.masking import mask_secrets
from hookline.runs.diff import flatten
from hookline.runs.jsonable import to_jsonable
from hookline.runs.run import Run
from hookline.trackers.names import make_trackers
from hookline.trackers.protocol import TrackedRun, Tracker
from hookline.trackers.worker import TrackerThread, read_from_step

log = logging.getLogger("hookline")

_MAX_VALUES = 100_000  # that wait for one tracker
_START_SECONDS = 60.0  # for trackers that a hook may call itself
_END_SECONDS = 30.0
_SHORT_END_SECONDS = 5.0  # somebody waits for the process to end
_LOOK_SECONDS = 0.1  # how often the end looks for a signal
_MAX_REPEATED = 100_000


def make_tracker_set(trackers: Any) -> TrackerSet | None:
    """Return the trackers of a loop; None if there are none, which costs nothing."""
    if isinstance(trackers, TrackerSet):
        return trackers
    if trackers is None or (type(trackers) in (list, tuple) and not trackers):
        return None
    return TrackerSet(trackers)


class TrackerSet:
    """The trackers of a loop."""

    def __init__(
        self,
        trackers: Any,
        *,
        max_values: int = _MAX_VALUES,
        end_seconds: float = _END_SECONDS,
    ) -> None:
        self._trackers = make_trackers(trackers)
        self._max_values, self._end_seconds = max_values, end_seconds
        self._threads: list[TrackerThread] = []
        self._run: Run | None = None
        self.is_signalled: Callable[[], bool] = lambda: False
        self._short_end: float | None = None  # when a wait that a signal has come in ends
        self._unwritten: list[TrackerThread] = []  # those whose ids are not in the manifest yet

    def start(self, run: Run, hparams: Mapping[str, Any]) -> None:
        """Start the trackers in their threads, and give them the run's record from now on."""
        self._run = run
        manifest = run.manifest
        config = {**manifest.get("config", {}), **mask_secrets(to_jsonable(dict(hparams)))}
        tracked = TrackedRun(
            id=run.id,
            folder=run.path if run.has_folder else None,
            name=manifest.get("name"),
            tags=manifest.get("tags") or (),
            manifest=dict(manifest),
            hyperparameters=flatten(config),
        )
        found = manifest.get("trackers", {})
        saved = {n: found[n] if isinstance(found.get(n), dict) else {} for n in self._trackers}
        for name, tracker in self._trackers.items():
            _prepare(name, tracker)
        self._threads = [
            TrackerThread(name, tracker, replace(tracked, saved=saved[name]), self._max_values)
            for name, tracker in self._trackers.items()
        ]
        self._unwritten = [*self._threads]
        assert run.metrics_log is not None
        run.metrics_log.listener = self.put
        until = time.monotonic() + _START_SECONDS
        for thread, tracker in zip(self._threads, self._trackers.values(), strict=True):
            if getattr(tracker, "is_awaited", False) and not thread.has_started.wait(
                max(0.0, until - time.monotonic())
            ):
                log.warning(
                    "The tracker '%s' has not started within %.0f s. Training begins without it; "
                    "values wait in memory.",
                    *(thread.name, _START_SECONDS),
                )
        self.write_ids()

    def put(self, records: Sequence[tuple[Any, ...]]) -> None:
        """Give all trackers records that have just been written."""
        for thread in self._threads:
            thread.put(records)
        if self._unwritten:
            self.write_ids()

    def checkpoint(self, path: str, step: Any) -> None:
        """Tell the trackers that a checkpoint is complete."""
        for thread in self._threads:
            thread.log_checkpoint(Path(path), step)

    def rewind(self, step: int | None) -> None:
        """Tell the trackers that the record was rewound to a step, or to its end."""
        if self._run is None or not self._run.has_folder:
            return
        step, kept = read_from_step(self._run.metrics_file, step, _MAX_REPEATED)
        for thread in self._threads:
            thread.rewind(step, kept)

    def finish(self, status: str) -> None:
        """End the trackers, and wait for them, but not long. The run itself may be closed."""
        if not self._threads:
            return
        seconds = self._end_seconds
        if status in ("interrupted", "preempted"):
            seconds = min(seconds, _SHORT_END_SECONDS)
        self._short_end = None
        for thread in self._threads:
            thread.finish(status)
        started = time.monotonic()
        waiting = [
            f"'{t.name}' ({t.waiting} values)" for t in self._wait(started + min(1, seconds))
        ]
        if waiting:
            log.warning("Waiting up to %.0f s for trackers: %s.", seconds, ", ".join(waiting))
        for thread in self._wait(started + seconds):
            log.warning(
                "The tracker '%s' has not ended: %d values may be missing there. The run's own "
                "record does not depend on it.",
                *(thread.name, thread.waiting),
            )
        for problem in self.describe_problems():
            log.warning("At the end of the run, %s.", problem)
        self.write_ids()

    def _wait(self, until: float) -> list[TrackerThread]:
        """Wait for the threads up to a time, not long after a signal; return those that go on."""
        for thread in self._threads:
            while not thread.join(min(until, time.monotonic() + _LOOK_SECONDS)):
                now = time.monotonic()
                if now >= until:
                    break
                if self.is_signalled():
                    self._short_end = self._short_end or now + _SHORT_END_SECONDS
                    until = min(until, self._short_end)
        return [thread for thread in self._threads if not thread.join(0.0)]

    def report(self) -> dict[str, dict[str, Any]]:
        """Return what each tracker lacks: how many values, and why. Empty if nothing is missing."""
        return {
            thread.name: {
                "dropped": thread.dropped,
                "failed": thread.failed,
                "problem": thread.problem,
            }
            for thread in self._threads
            if thread.dropped or thread.failed or thread.problem
        }

    def describe_problems(self) -> list[str]:
        """Return what each tracker lacks, one line each."""
        lacking = {name: one["dropped"] + one["failed"] for name, one in self.report().items()}
        return [
            f"the tracker '{name}' lacks {count} value{'' if count == 1 else 's'}"
            for name, count in lacking.items()
        ]

    def close(self) -> None:
        """Forget the run."""
        self._threads, self._unwritten, self._run = [], [], None

    def write_ids(self) -> None:
        """Write the ids of the tools' runs to the manifest, of trackers that have started."""
        started = [thread for thread in self._unwritten if thread.ids is not None]
        if not started or self._run is None:
            return
        self._unwritten = [t for t in self._unwritten if t not in started]
        self._run.add_to_field("trackers", {thread.name: thread.ids for thread in started})


def _prepare(name: str, tracker: Tracker) -> None:
    """Let a tracker look at what the program has done with its tool in this thread."""
    prepare: Any = getattr(tracker, "prepare", None)
    if prepare is not None:
        try:
            prepare()
        except Exception:
            log.exception("The tracker '%s' could not be prepared. Training continues.", name)
