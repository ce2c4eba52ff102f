"""The trackers of a loop: started with its run, given its record, and ended with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hookline.masking import mask_secrets
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_file import read_jsonl_backwards
from hookline.runs.run import Run
from hookline.trackers.tracker import TrackedRun, flatten
from hookline.trackers.tracker_names import make_trackers
from hookline.trackers.tracker_thread import TrackerThread

__all__ = ["TrackerSet", "make_tracker_set"]

log = logging.getLogger("hookline")

_MAX_VALUES = 100_000  # that wait for one tracker
_START_SECONDS = 60.0  # for trackers that a hook may call itself
_END_SECONDS = 30.0
_SHORT_END_SECONDS = 5.0  # somebody waits for the process to end
_MAX_REPEATED = 100_000


def make_tracker_set(given: Any) -> TrackerSet | None:
    """Return the trackers of a loop; None if there are none, which costs nothing."""
    return TrackerSet(given) if given is not None and given != () and given != [] else None


class TrackerSet:
    """The trackers of a loop.

    Args:
        given: names, objects, or mappings with `name` and options, as for `Trainer`.
        max_values: how many values may wait for one tracker.
        end_seconds: how long the end of a run waits for trackers.
    """

    def __init__(
        self,
        given: Any,
        *,
        max_values: int = _MAX_VALUES,
        end_seconds: float = _END_SECONDS,
    ) -> None:
        self._trackers = make_trackers(given)
        self._max_values, self._end_seconds = max_values, end_seconds
        self._threads: list[TrackerThread] = []
        self._run: Run | None = None
        self._unwritten: list[TrackerThread] = []  # those whose ids are not in the manifest yet
        self._left: dict[str, int] = {}

    def start(self, run: Run, hparams: Mapping[str, Any]) -> None:
        """Start the trackers in their threads, and give them the run's record from now on."""
        self._run, self._left = run, {}
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
        saved = manifest.get("trackers", {})
        self._threads = [
            TrackerThread(name, tracker, _with_ids(tracked, saved.get(name)), self._max_values)
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
        self._write_ids()

    def put(self, records: Sequence[tuple[Any, ...]]) -> None:
        """Give all trackers records that have just been written."""
        for thread in self._threads:
            thread.put(records)
        if self._unwritten:
            self._write_ids()

    def checkpoint(self, path: str, step: Any) -> None:
        """Tell the trackers that a checkpoint is complete."""
        for thread in self._threads:
            thread.call("log_checkpoint", Path(path), step)

    def rewind(self, step: int | None) -> None:
        """Tell the trackers that the run's record was rewound to a step, or to its end."""
        if self._run is None or not self._run.has_folder:
            return
        kept: list[tuple[Any, ...]] = []
        for record in read_jsonl_backwards(self._run.metrics_file):
            step = record["step"] if step is None else step
            if record["step"] < step or len(kept) >= _MAX_REPEATED:
                break
            value = record["value"]
            if record["kind"] == "scalar" and isinstance(value, str):
                value = float(value)
            fields = (record[name] for name in ("step", "epoch", "time", "name", "kind"))
            kept.append((*fields, value))
        for thread in self._threads:
            thread.call("rewind", step or 0, kept[::-1])

    def finish(self, status: str) -> None:
        """End the trackers, and wait for them, but not long."""
        if not self._threads:
            return
        seconds = self._end_seconds
        if status in ("interrupted", "preempted"):
            seconds = min(seconds, _SHORT_END_SECONDS)
        for thread in self._threads:
            thread.finish(status)
        started = time.monotonic()
        soon = started + min(1.0, seconds)
        waiting = [f"'{t.name}' ({t.waiting} values)" for t in self._threads if not t.join(soon)]
        if waiting:
            log.warning("Waiting up to %.0f s for trackers: %s.", seconds, ", ".join(waiting))
        for thread in self._threads:
            if not thread.join(started + seconds):
                self._left[thread.name] = thread.waiting
                log.warning(
                    "The tracker '%s' has not ended: %d values may be missing there. The run's own "
                    "record is complete.",
                    *(thread.name, thread.waiting),
                )
        self._write_ids()

    def report(self) -> dict[str, dict[str, Any]]:
        """Return what each tracker lacks: how many values, and why. Empty if nothing is missing."""
        missing: dict[str, dict[str, Any]] = {}
        for thread in self._threads:
            counts = {"dropped": thread.dropped, "failed": thread.failed}
            counts["left"] = self._left.get(thread.name, 0)
            if any(counts.values()) or thread.problem or thread.name in self._left:
                missing[thread.name] = {**counts, "problem": thread.problem}
        return missing

    def describe_problems(self) -> list[str]:
        """Return what each tracker lacks, one line each."""
        return [
            f"the tracker '{name}' lacks "
            f"{found['dropped'] + found['failed'] + found['left']} values"
            for name, found in self.report().items()
        ]

    def close(self) -> None:
        """Forget the run."""
        self._threads, self._unwritten, self._run = [], [], None

    def _write_ids(self) -> None:
        started = [thread for thread in self._unwritten if thread.ids is not None]
        if started and self._run is not None:
            self._unwritten = [t for t in self._unwritten if t not in started]
            known = self._run.manifest.get("trackers", {})
            self._run.update(trackers={**known, **{t.name: t.ids for t in started}})


def _with_ids(run: TrackedRun, saved: Any) -> TrackedRun:
    return replace(run, saved=saved) if isinstance(saved, dict) else run
