"""The time of a logged value on the training thread, without trackers and with some."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from hookline.runs.run import Run
from hookline.trackers.tracker_set import TrackerSet

_VALUES = 50_000


def measure(names: list[str]) -> float:
    """Return the microseconds per value that `run.log` takes, the writing of buffers included."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(folder, config={}, seed=0, hooks=[])
        trackers = TrackerSet(names, end_seconds=120) if names else None
        if trackers is not None:
            trackers.start(run, {})
            for thread in trackers._threads:
                thread.has_started.wait()
        started = time.perf_counter()
        for step in range(_VALUES // 10):
            for number in range(10):
                run.log(step, 0, f"value/{number}", 0.5)
            time.sleep(0.0005)  # a step's other work, in which the trackers' threads run
        run.flush()
        taken = time.perf_counter() - started - _idle()
        if trackers is not None:
            trackers.finish("completed")
        run.close()
        return taken / _VALUES * 1e6


def _idle() -> float:
    started = time.perf_counter()
    for _ in range(_VALUES // 10):
        time.sleep(0.0005)
    return time.perf_counter() - started


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    with tempfile.TemporaryDirectory() as home:
        os.environ["TRACKIO_DIR"] = str(Path(home))
        for names in [[], *([name] for name in sys.argv[1:] or ["tensorboard", "wandb"])]:
            print(f"{', '.join(names) or 'no tracker'}: {measure(names):.1f} µs per value")
