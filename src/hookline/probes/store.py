"""The store of captured states: keeps them within limits and counts what did not fit."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from hookline.arguments import show_value
from hookline.errors import ConfigError, HooklineError
from hookline.probes.captured_state import CapturedState
from hookline.tensors.memory import storages

log = logging.getLogger("hookline")


class Counts(NamedTuple):
    """How many states a probe has captured, and where they are: `captured` is the sum."""

    captured: int = 0
    kept: int = 0
    """In memory now."""
    dropped: int = 0
    """Did not fit."""
    cleared: int = 0
    """Removed by `clear`."""


_Storages = Mapping[Any, tuple[int, Any]]
"""The sizes and storages of a state, by address, as `storages` returns them."""


class _Stored(NamedTuple):
    """A state in the store. The storages keep the memory alive, so no address is counted twice."""

    probe: str
    state: CapturedState
    held: _Storages


@dataclass(slots=True)
class _ProbeCounts:
    """The numbers of states of one probe."""

    captured: int = 0
    cleared: int = 0
    too_large: int = 0  # dropped, because one alone exceeds the limit on bytes
    over_memory: int = 0  # dropped later, because of that limit
    over_states: int = 0  # because of the limit on their number
    warned: bool = False

    def counts(self) -> Counts:
        dropped = self.too_large + self.over_memory + self.over_states
        kept = self.captured - dropped - self.cleared
        return Counts(self.captured, kept, dropped, self.cleared)


class Store:
    """Keeps captured states within limits. Safe to use from several threads.

    States that do not fit are dropped, the oldest of all probes first. The bytes that are counted
    are those kept alive: whole storages, also of views, each once, however many states share it.
    They are within `memory_limit` whenever a call returns. Objects other than tensors are not
    counted.

    Args:
        max_states: How many states to keep, over all probes; None for all.
        memory_limit: How many bytes to keep, over all probes; None for no limit.
        cleanup_interval: How many captures to wait between two checks of `max_states`: in between,
            up to `cleanup_interval - 1` more are kept. The limit on bytes is always checked.
    """

    def __init__(
        self,
        max_states: int | None = None,
        memory_limit: int | None = None,
        cleanup_interval: int = 1,
    ) -> None:
        check_limit("max_states", max_states)
        check_limit("memory_limit", memory_limit)
        check_limit("cleanup_interval", cleanup_interval, optional=False)
        self.max_states = max_states
        self.memory_limit = memory_limit
        self.cleanup_interval = cleanup_interval
        self._limit = math.inf if memory_limit is None else memory_limit
        self._since_cleanup = 0
        self._lock = RLock()
        self._nbytes = 0
        self._holders: dict[Any, int] = {}  # the number of states, by storage
        self._stored: OrderedDict[int, _Stored] = OrderedDict()  # by key, oldest first
        self._counts: dict[str, _ProbeCounts] = {}
        self._keys = count()
        self._closed = False
        self._owners: WeakValueDictionary[str, Any] = WeakValueDictionary()

    # -- adding

    def unique_name(self, name: str, owner: Any) -> str:
        """Return a name that no other owner has here: this one, or one with a number."""
        with self._lock:
            unique, number = name, 1
            while self._owners.get(unique, owner) is not owner:
                number += 1
                unique = f"{name}_{number}"
            self._owners[unique] = owner
            return unique

    def add(self, probe: str, state: CapturedState) -> int:
        """Keep a state, make room for it, and return its key, also if it was dropped."""
        held = storages(state.contents())
        nbytes = 0
        for size, _ in held.values():  # faster than `sum`, at each capture
            nbytes += size
        with self._lock:
            if self._closed:
                raise HooklineError("This store of captured states is closed. Create a new one.")
            counts = self._counts.get(probe)
            if counts is None:
                counts = self._counts[probe] = _ProbeCounts()
            counts.captured += 1
            key = next(self._keys)
            if nbytes > self._limit:
                counts.too_large += 1
                problem = f"has {nbytes} bytes, but memory_limit is {self._limit}. It was dropped"
                self._warn(probe, problem)
                return key
            self._hold(held)
            self._stored[key] = _Stored(probe, state, held)
            self._make_room(after_capture=True)
            return key

    def add_gradient(self, key: int, gradient: Any) -> bool:
        """Add a gradient, which is known after backward, to a state by the key that `add` returned.

        Return whether the state is still there and has it now.
        """
        with self._lock:
            stored = self._stored.get(key)
            if stored is None:
                return False
            state = stored.state
            before = state.contents()[-1]
            state.gradient = gradient
            held = storages(state.contents())
            if sum(size for size, _ in held.values()) > self._limit:
                state.gradient = before
                problem = f"with its gradient would exceed memory_limit, {self._limit} bytes"
                self._warn(stored.probe, f"{problem}. It was not added")
                return False
            self._hold(held)
            self._release(stored.held)
            self._stored[key] = stored._replace(held=held)
            self._make_room()
            return key in self._stored

    # -- reading

    def states(self, probe: str, module: str | None = None) -> list[CapturedState]:
        """Return a probe's states, or those of one module, oldest first."""
        with self._lock:
            states = [one.state for one in self._stored.values() if one.probe == probe]
        return [state for state in states if module is None or state.module == module]

    def counts(self, probe: str | None = None) -> Counts:
        """Return how many states of a probe, or of all together, there were and where they are."""
        with self._lock:
            each = [c.counts() for name, c in self._counts.items() if probe in (None, name)]
            return Counts(*map(sum, zip(*each, strict=True))) if each else Counts()

    def over_limits(self, probe: str) -> tuple[int, int]:
        """Return how many states of a probe were dropped for bytes, and for `max_states`."""
        with self._lock:
            counts = self._counts.get(probe, _ProbeCounts())
            return counts.over_memory, counts.over_states

    @property
    def nbytes(self) -> int:
        """The exact number of bytes kept in memory."""
        with self._lock:
            return self._nbytes

    # -- removing

    def clear(self, probe: str | None = None) -> None:
        """Free a probe's states, or all; the counts are kept."""
        with self._lock:
            keys = [key for key, one in self._stored.items() if probe in (None, one.probe)]
            for key in keys:
                self._free(key).cleared += 1

    def forget(self, probe: str) -> None:
        """Free everything of a probe, also its counts."""
        with self._lock:
            self.clear(probe)
            self._counts.pop(probe, None)

    def close(self) -> None:
        """Free everything; nothing can be added afterwards."""
        with self._lock:
            self._closed = True
            self.clear()
            self._counts.clear()

    # -- within the limits

    def _make_room(self, *, after_capture: bool = False) -> None:
        """Drop the oldest states. Those that share memory free it with the last of them."""
        if after_capture and self.max_states is not None:
            self._since_cleanup += 1
            if self._since_cleanup >= self.cleanup_interval:
                self._since_cleanup = 0
                while len(self._stored) > self.max_states:
                    self._free(next(iter(self._stored))).over_states += 1
        while self._nbytes > self._limit:
            self._free(next(iter(self._stored))).over_memory += 1

    def _free(self, key: int) -> _ProbeCounts:
        """Remove a state, and return the counts of its probe."""
        stored = self._stored.pop(key)
        self._release(stored.held)
        return self._counts[stored.probe]

    def _hold(self, held: _Storages) -> None:
        """Count the storages of a state, each once, however many states share it."""
        for key, (size, _) in held.items():
            holders = self._holders.get(key, 0)
            self._holders[key] = holders + 1
            if not holders:
                self._nbytes += size

    def _release(self, released: _Storages) -> None:
        for key, (size, _) in released.items():
            holders = self._holders[key] - 1
            if holders:
                self._holders[key] = holders
            else:
                del self._holders[key]
                self._nbytes -= size

    def _warn(self, probe: str, problem: str) -> None:
        counts = self._counts[probe]
        if not counts.warned:
            counts.warned = True
            log.warning(
                "Probe '%s': a state %s. This warning is shown once. Capture less (a slice, "
                "another dtype, fewer modules) or raise the limit.",
                *(probe, problem),
            )


def check_limit(name: str, value: Any, *, optional: bool = True) -> None:
    """Raise unless a limit is a positive integer, or None."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        none = " or None" if optional else ""
        raise ConfigError(f"{name} must be a positive integer{none}, not {show_value(value)}.")
