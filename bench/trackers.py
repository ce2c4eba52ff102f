"""Measure what trackers add to a training step: one that works, one that is stuck, and TensorBoard.

Measured is the time of the training thread in steps of about 2 ms, with a tracker over without one;
and the CPU time of the tracker's own threads. These share the interpreter with training, so that
the wall time of a step grows by up to as much; it is only known on an idle machine.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from bench.harness import Row, Spread, interleave
from hookline.runs.run import Run
from hookline.trackers.group import TrackerSet

__all__ = ["run"]

_VALUES_PER_STEP = 10
_STEPS = 100  # whose values are written together


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


class _Times(NamedTuple):
    """Seconds per step."""

    logging: float  # CPU time of the training thread in `run.log`, the writing of buffers included
    step: float  # wall time of the whole step
    background: float  # CPU time of all other threads


def run(*, quick: bool) -> list[Row]:
    makers: dict[str, Any] = {"none": None, "quick": _Quick, "stuck": _Stuck}
    if find_spec("tensorboard") is not None:
        makers["tensorboard"] = lambda: "tensorboard"
    times: dict[str, list[_Times]] = {name: [] for name in makers}
    interleave(
        {name: partial(_measure, make, times[name]) for name, make in makers.items()},
        rounds=5 if quick else 30,
        warmup=1,
    )
    none = [one.step * 1e6 for one in times["none"][1:]]  # without the warm-up
    title = f"a step that logs {_VALUES_PER_STEP} values, without trackers"
    rows = [Row(title, Spread.of(none), "µs")]
    for name in list(makers)[1:]:
        pairs = zip(times[name][1:], times["none"][1:], strict=True)
        added = zip(
            *([(x - y) * 1e6 for x, y in zip(a, b, strict=True)] for a, b in pairs), strict=True
        )
        logging, step, background = (Spread.of(values) for values in added)
        # A step of 5 ms that logs ten values may take 1 % longer.
        rows += [
            Row(f"    {name}: CPU time added to logging", logging, "µs", limit=50.0),
            Row("        wall time added to the step", step, "µs"),
            Row("        CPU time of its own threads", background, "µs"),
        ]
    return rows


class _Step:
    """The work of a training step of about 2 ms: forward, backward and optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(256, 256) for _ in range(4))
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)
        self._input = torch.randn(64, 256)

    def run(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._input).square().mean().backward()
        self._optimizer.step()


def _measure(make: Any, times: list[_Times]) -> float:
    """Add the times of a training; return its seconds per step.

    As many values as the steps log are given to the tracker at the beginning, so that its threads
    work meanwhile as in a training that goes on.

    Args:
        make: makes a tracker; None: there is none.
        times: gets the times.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(folder, config={}, seed=0, hooks=[])
        seconds = 0.1 if make is _Stuck else 60.0
        trackers = None if make is None else TrackerSet([make()], end_seconds=seconds)
        if trackers is not None:
            trackers.start(run, {})
            for thread in trackers._threads:
                thread.has_started.wait()
        step = _Step()
        for number in range(_STEPS - 1):
            _log_values(run, number)
        others = time.process_time() - time.thread_time()
        logging = 0.0
        begin = time.perf_counter()
        for number in range(_STEPS):
            before = time.thread_time()
            _log_values(run, number)  # the first fills the buffer, which is written
            logging += time.thread_time() - before
            step.run()
        spent = time.perf_counter() - begin
        run.close()
        if trackers is not None:
            trackers.finish("completed")
            trackers.close()
        background = (time.process_time() - time.thread_time() - others) / (2 * _STEPS)
        times.append(_Times(logging / _STEPS, spent / _STEPS, background))
        return spent / _STEPS


def _log_values(run: Run, step: int) -> None:
    for value in range(_VALUES_PER_STEP):
        run.log(step, 0, f"value/{value}", 0.5)
