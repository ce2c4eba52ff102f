"""Tracker: what an experiment tracker does for a run, and what it gets of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

__all__ = ["TrackedRun", "TrackedValue", "Tracker", "flatten"]


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
    """What `start` returned in an earlier part of the run, if it is resumed."""


@runtime_checkable
class Tracker(Protocol):
    """An experiment tracker. Its methods are called in one thread, which is not training's.

    An exception is logged, counted and isolated. Three more methods are called if they exist:

    - `prepare()`: called before `start`, in training's thread, which waits for it: a tool may keep
      a thread's active run.

    - `log_checkpoint(path, step)`: a checkpoint is complete in the folder `path`.
    - `rewind(step, values)`: the run continues from an earlier checkpoint. All that was logged from
      `step` on is void, apart from `values`.

    Three attributes are read if they exist:

    - `name`.
    - `unsaved_seconds`: how long the tool itself keeps values in memory. If the process is killed,
      a resumed run logs what the tool lacks of its record, and what was logged in the last
      `unsaved_seconds`.
    - `is_continued`: set to False by `start` if the tool has nothing of the run any more, for
      example because its run was deleted. A resumed run then logs its whole record.
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


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with names such as `optimizer.lr`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
