"""The values of steps, averaged over all processes many steps at a time, and then recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.context import to_float
from hookline.loop.processes import OneProcess

__all__ = ["StepRecords"]

_EVERY = 50  # steps


class StepRecords:
    """Keeps the values of each step, such as `train/loss`, until they are averaged and recorded.

    One collective per report instead of one per step: a step neither waits for other processes nor
    for the device.
    """

    def __init__(self, processes: OneProcess) -> None:
        self._processes = processes
        self._values: list[tuple[int, int | None, str, Any]] = []

    def add(self, step: int, epoch: int | None, name: str, value: Any) -> None:
        """Keep a value: a number, or a tensor with one element."""
        self._values.append((step, epoch, name, value))

    def is_due(self, step: int) -> bool:
        """Return whether the values are recorded after this step."""
        return step % _EVERY == 0

    def own_values(self) -> list[tuple[int, int | None, str, float]]:
        """Return what is kept of this process: step, epoch, name and value."""
        return [(step, epoch, name, to_float(value)) for step, epoch, name, value in self._values]

    def report(
        self,
        run: Any,
        own_values: Mapping[str, float] | None = None,
        at: tuple[int, int] = (0, 0),
    ) -> None:
        """Average what was kept over all processes, and record it in the run, if there is one.

        All processes have to call this.

        Args:
            run: the run; None in other ranks than 0.
            own_values: values of this process alone, whose names begin with "ranks/".
            at: the step and the epoch that these are recorded with.
        """
        self._record(run, self._processes, own_values or {}, at)

    def report_own(self, run: Any) -> int:
        """Record the values of this process alone; return of how many steps."""
        steps = len({step for step, *_ in self._values})
        self._record(run, OneProcess(), {}, (0, 0))
        return steps

    def _record(
        self, run: Any, processes: OneProcess, own_values: Mapping[str, float], at: tuple[int, int]
    ) -> None:
        kept, self._values = self._values, []
        own: dict[Any, tuple[float, float]] = {}
        for step, epoch, name, value in kept:
            attempt = 0  # a step that was skipped has the number of the step before
            while (step, attempt, epoch, name) in own:
                attempt += 1
            own[step, attempt, epoch, name] = (to_float(value), 1.0)
        step, epoch = at
        own |= {(step, 0, epoch, name): (value, 1.0) for name, value in own_values.items()}
        sums = processes.sum_on_main(own)
        if run is None or sums is None:
            return
        for key in sorted(sums, key=lambda key: key[:2]):  # a process need not have all names
            step, _, epoch, name = key
            total, weight = sums[key]
            run.log(step, epoch, name, total / weight)
