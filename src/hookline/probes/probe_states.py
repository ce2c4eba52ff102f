"""What the store knows of each probe: its states, their memory and how many there were."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hookline.probes.captured_state import CapturedState
from hookline.probes.spilled_state import SpilledState

__all__ = ["Counts", "ProbeStates", "StorageCounter", "StoredState"]


class Counts(NamedTuple):
    """How many states a probe has captured, and where they are: `captured` is the sum."""

    captured: int = 0
    kept: int = 0
    """In memory now."""
    spilled: int = 0
    """On disk now."""
    dropped: int = 0
    """Did not fit."""
    cleared: int = 0
    """Removed by `clear`."""


@dataclass(slots=True, eq=False)
class StoredState:
    """One state, in memory or on disk."""

    key: int
    state: CapturedState | SpilledState
    storages: dict[Any, tuple[int, Any]]  # keeps the memory alive until it is released
    nbytes: int
    rank: float = 0.0  # random; a sample keeps the lowest

    @property
    def metadata(self) -> CapturedState:
        """The state; if it is on disk, with placeholders instead of tensors."""
        return self.state.metadata if isinstance(self.state, SpilledState) else self.state

    def read(self) -> CapturedState:
        """Return the state, from disk if it is there."""
        return self.state.read() if isinstance(self.state, SpilledState) else self.state


@dataclass(slots=True, eq=False)
class ProbeStates:
    """The states of one probe, oldest first."""

    probe: str
    random: random.Random
    memory: OrderedDict[int, StoredState] = field(default_factory=OrderedDict[int, StoredState])
    disk: dict[int, StoredState] = field(default_factory=dict[int, StoredState])
    highest: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # a heap
    below: float = math.inf  # a sample takes only ranks below this
    nbytes: int = 0  # of each state by itself
    since_cleanup: int = 0
    captured: int = 0
    dropped: int = 0
    cleared: int = 0
    warned: bool = False

    def counts(self) -> Counts:
        """Return how many states there were, and where they are."""
        return Counts(self.captured, len(self.memory), len(self.disk), self.dropped, self.cleared)


class StorageCounter:
    """Counts the bytes that states keep alive, each storage once, however many states share it.

    The caller of `hold` has to keep the storages alive until it calls `release`. Otherwise their
    address might be reused and be taken for the same memory.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._holders: dict[Any, int] = {}  # the number of states, by storage

    def hold(self, storages: Mapping[Any, tuple[int, Any]]) -> None:
        """Count the storages of a state, as `hookline.tensors.memory.storages` returns them."""
        for key, (size, _) in storages.items():
            holders = self._holders.get(key, 0)
            self._holders[key] = holders + 1
            if not holders:
                self.nbytes += size

    def release(self, storages: Mapping[Any, tuple[int, Any]]) -> None:
        """Undo one `hold`."""
        for key, (size, _) in storages.items():
            holders = self._holders[key] - 1
            if holders:
                self._holders[key] = holders
            else:
                del self._holders[key]
                self.nbytes -= size

    def count_new(self, storages: Mapping[Any, tuple[int, Any]]) -> int:
        """Return how many bytes `hold` would add."""
        return sum(size for key, (size, _) in storages.items() if key not in self._holders)
