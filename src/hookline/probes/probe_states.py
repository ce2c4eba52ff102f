"""What the store knows of each probe: its states, and what became of all it captured."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hookline.probes.captured_state import CapturedState
from hookline.probes.spilled_state import Spilled

__all__ = ["Counts", "ProbeStates", "Record"]


class Counts(NamedTuple):
    """What became of a probe's states: `captured` is the sum of all the others."""

    captured: int = 0
    kept: int = 0
    """In memory now."""
    spilled: int = 0
    """On disk now."""
    dropped: int = 0
    """Did not fit."""
    cleared: int = 0
    """Taken away by `clear`."""


@dataclass(slots=True, eq=False)
class Record:
    """One state, in memory or on disk."""

    key: int
    state: CapturedState | Spilled
    places: dict[Any, tuple[int, Any]]  # with the memory itself, whatever becomes of the state
    nbytes: int
    rank: float = 0.0  # drawn at random; a sample keeps the lowest

    @property
    def shell(self) -> CapturedState:
        """The state, or of one on disk all but its tensors."""
        return self.state.shell if isinstance(self.state, Spilled) else self.state

    def read(self) -> CapturedState:
        """Return the state, from disk if it is there."""
        return self.state.read() if isinstance(self.state, Spilled) else self.state


@dataclass(slots=True, eq=False)
class ProbeStates:
    """The states of one probe, oldest first."""

    probe: str
    random: random.Random
    memory: OrderedDict[int, Record] = field(default_factory=OrderedDict[int, Record])
    disk: dict[int, Record] = field(default_factory=dict[int, Record])
    highest: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # a heap
    below: float = math.inf  # a sample takes ranks below this only
    nbytes: int = 0  # each state's own
    since_cleanup: int = 0
    captured: int = 0
    dropped: int = 0
    cleared: int = 0
    warned: bool = False

    def counts(self) -> Counts:
        """Return what became of the probe's states."""
        return Counts(self.captured, len(self.memory), len(self.disk), self.dropped, self.cleared)
