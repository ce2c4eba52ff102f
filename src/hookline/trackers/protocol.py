"""Tracker: what an experiment tracker does for a run, and what it gets of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

_MAX_FAILURES = 20  # values in a row: then the tool is not there


class TrackedValue(NamedTuple):
    """One value of the run's record.

    The values by kind: `scalar`: a float or int, also NaN and infinities; `text`: a string;
    `histogram`: a mapping with `counts` and `edges`; `image`: the path of a PNG file.
    """

    step: int
    name: str
    kind: str
    value: Any
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker gets it when it starts. Secrets are masked."""

    id: str
    folder: Path | None
    """The run's folder; None if the run has none (`runs=None`)."""

    name: str | None = None
    tags: Sequence[str] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hyperparameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The configuration and `hparams`, flat: `optimizer.lr`."""

    saved: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The ids that `start` returned in an earlier attempt, if the run is resumed."""


@runtime_checkable
class Tracker(Protocol):
    """An experiment tracker. Its methods are called in one thread, which is not training's.

    An exception is logged, counted and isolated. Three more methods are called if they exist:

    - `prepare()`: called before `start`, in training's thread, which waits for it: a tool may keep
      a thread's active run.
    - `log_checkpoint(path, step)`: a checkpoint is complete in the folder `path`.
    - `rewind(step, values)`: the run continues from an earlier checkpoint. All that was logged from
      `step` on is void, apart from `values`.

    Its attribute `name` is read if it exists.
    """

    def start(self, run: TrackedRun) -> Mapping[str, Any] | None:
        """Start or continue a run of the tool; return its ids, for the run's manifest."""
        ...

    def log(self, values: Sequence[TrackedValue]) -> None:
        """Log values, in the order of the run's record."""
        ...

    def finish(self, status: str) -> None:
        """Write everything, and end the run of the tool."""
        ...


class RefusedValues(Exception):  # noqa: N818 - not an error of the tracker as a whole
    """Some values were not logged; all others were."""

    def __init__(self, count: int, error: Exception) -> None:
        super().__init__(f"{count} values were refused, the first one because of: {error!r}")
        self.count, self.error = count, error


def log_each(log: Callable[[TrackedValue], None], values: Iterable[TrackedValue]) -> None:
    """Log values one by one; raise `RefusedValues` at the end if some could not be logged."""
    first: Exception | None = None
    refused = in_a_row = 0
    for value in values:
        if in_a_row == _MAX_FAILURES:
            refused += 1
            continue
        try:
            log(value)
            in_a_row = 0
        except Exception as error:
            first = first or error
            refused, in_a_row = refused + 1, in_a_row + 1
    if first is not None:
        raise RefusedValues(refused, first)


class RowTracker:
    """Base of trackers that log the values of a step as one row."""

    def __init__(self) -> None:
        self._row: dict[str, Any] = {}  # of the step that is being logged
        self._last: TrackedValue | None = None  # of the row

    def log(self, values: Sequence[TrackedValue]) -> None:
        """Log one row for each step."""
        try:
            log_each(self._add, values)
        finally:
            self._end_row()

    def _add(self, value: TrackedValue) -> None:
        name, converted = self._convert(value)
        if self._last is not None and (self._last.step != value.step or name in self._row):
            self._end_row()
        self._row[name], self._last = converted, value

    def _end_row(self) -> None:
        row, last, self._row, self._last = self._row, self._last, {}, None
        if last is not None:
            self._log_row(row, last.step, last.time)

    def _convert(self, value: TrackedValue) -> tuple[str, Any]:
        """Return a value's name and the value as the tool takes them."""
        raise NotImplementedError

    def _log_row(self, row: Mapping[str, Any], step: int, seconds: float) -> None:
        """Log the values of a step by name, of which the last was logged at this time."""
        raise NotImplementedError
