"""What trackers add to a logged value on the training thread: one that works, one that is stuck."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench.harness import Row, Spread, interleave
from hookline.runs.run import Run
from hookline.trackers.tracker_set import TrackerSet

__all__ = ["run"]

_VALUES_PER_STEP = 10


class _Quick:
    """A tracker that only counts."""

    name = "quick"

    def start(self, run: Any) -> None:
        self.count = 0

    def log(self, values: Sequence[Any]) -> None:
        self.count += len(values)

    def finish(self, status: str) -> None:
        pass


class _Stuck(_Quick):
    """A tracker that never returns, as one whose server is gone."""

    name = "stuck"

    def log(self, values: Sequence[Any]) -> None:
        threading.Event().wait()


def run(*, quick: bool) -> list[Row]:
    steps = 500 if quick else 2000
    trackers: dict[str, Any] = {"none": None, "quick": _Quick, "stuck": _Stuck}
    if find_spec("tensorboard") is not None:
        trackers["tensorboard"] = lambda: "tensorboard"
    measured = interleave(
        {name: partial(_measure, make, steps) for name, make in trackers.items()},
        rounds=3 if quick else 12,
        warmup=1,
    )
    none = Spread.of(measured.seconds["none"]).scaled(1e6)
    rows = [Row("a logged value, without trackers", none, "µs")]
    for name in list(trackers)[1:]:
        added = measured.excess(name, "none").scaled(1e6)
        # A step of 5 ms that logs ten values may take 1 % longer: 5 µs for each.
        limit = None if name == "tensorboard" else 5.0
        rows.append(Row(f"    added by a tracker: {name}", added, "µs", limit=limit))
    return rows


def _measure(make: Any, steps: int) -> float:
    """Return the seconds per value that `run.log` takes, the writing of buffers included."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(folder, config={}, seed=0, hooks=[])
        seconds = 0.2 if make is _Stuck else 60.0
        trackers = None if make is None else TrackerSet([make()], end_seconds=seconds)
        if trackers is not None:
            trackers.start(run, {})
            for thread in trackers._threads:
                thread.has_started.wait()
        spent = 0.0
        for step in range(steps):
            time.sleep(0.0005)  # a step's other work, in which the trackers' threads run
            begin = time.perf_counter()
            for number in range(_VALUES_PER_STEP):
                run.log(step, 0, f"value/{number}", 0.5)
            spent += time.perf_counter() - begin
        begin = time.perf_counter()
        run.flush()
        spent += time.perf_counter() - begin
        run.close()
        if trackers is not None:
            trackers.finish("completed")
            trackers.close()
        return spent / (steps * _VALUES_PER_STEP)
