"""The store of captured states: keeps them within limits and counts what did not fit."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import RLock
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakValueDictionary

from hookline.arguments import check_choice, show_value
from hookline.errors import ConfigError, HookFailedError, HooklineError
from hookline.probes.captured_state import CapturedState
from hookline.tensors.memory import storages

log = logging.getLogger("hookline")

Policy = Literal["drop_oldest", "error"]
"""How states that do not fit are treated."""


class StoreFullError(HookFailedError, MemoryError):
    """A state does not fit into the store, and nothing may be dropped. Training stops."""


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


@dataclass(slots=True, eq=False)
class _ProbeStates:
    """The states of one probe, oldest first."""

    probe: str
    # By key. The storages keep the memory alive: else its address might be reused while it counts.
    stored: OrderedDict[int, tuple[CapturedState, _Storages]] = field(default_factory=OrderedDict)
    since_cleanup: int = 0
    captured: int = 0
    dropped: int = 0
    over_memory: int = 0  # of those dropped: because of the limit on bytes
    over_total: int = 0  # because of the limit on the states of all probes together
    cleared: int = 0
    warned: bool = False

    def counts(self) -> Counts:
        return Counts(self.captured, len(self.stored), self.dropped, self.cleared)


class Store:
    """Keeps captured states within limits. Safe to use from several threads.

    The bytes that are counted are those kept alive: whole storages, also of views, each once,
    however many states share it. They are within `memory_limit` whenever a call returns. Objects
    other than tensors are not counted.

    Args:
        max_states: How many states of each probe to keep; None for all.
        memory_limit: How many bytes to keep, over all probes; None for no limit.
        policy: What happens to states that do not fit:

            - `"drop_oldest"`: the oldest state is dropped; for bytes, the oldest of all probes;
            - `"error"`: `StoreFullError` is raised, and the states before are kept.
        cleanup_interval: How many captures to wait between two checks of `max_states` (captures of
            the probe) and `max_total_states` (of all): in between, up to `cleanup_interval - 1`
            more are kept. The limit on bytes, and the policy `"error"`, are always checked at once.
        max_total_states: How many states to keep, over all probes; None for all.
    """

    def __init__(
        self,
        max_states: int | None = None,
        memory_limit: int | None = None,
        policy: Policy = "drop_oldest",
        cleanup_interval: int = 1,
        max_total_states: int | None = None,
    ) -> None:
        check_limit("max_states", max_states)
        check_limit("memory_limit", memory_limit)
        check_limit("max_total_states", max_total_states)
        check_limit("cleanup_interval", cleanup_interval, optional=False)
        check_choice("policy", policy, get_args(Policy))
        self.max_states = max_states
        self.max_total_states = max_total_states
        self.memory_limit = memory_limit
        self.policy: Policy = policy
        self.cleanup_interval = cleanup_interval
        self._limit = math.inf if memory_limit is None else memory_limit
        self._since_cleanup = 0
        self._lock = RLock()
        self._nbytes = 0
        self._holders: dict[Any, int] = {}  # the number of states, by storage
        self._probes: dict[str, _ProbeStates] = {}
        # The probe of each state, by key, oldest first.
        self._oldest: OrderedDict[int, _ProbeStates] = OrderedDict()
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
        state_storages = storages(state.contents())
        nbytes = 0
        for size, _ in state_storages.values():  # faster than `sum`, at each capture
            nbytes += size
        with self._lock:
            if self._closed:
                raise HooklineError("This store of captured states is closed. Create a new one.")
            states = self._probes.get(probe)
            if states is None:
                states = self._probes[probe] = _ProbeStates(probe)
            states.captured += 1
            key = next(self._keys)
            if self.policy == "error":
                self._raise_if_full(states, state_storages)
            if nbytes > self._limit:
                states.dropped += 1
                problem = f"has {nbytes} bytes, but memory_limit is {self._limit}. It was dropped"
                _warn(states, problem)
                return key
            self._hold(state_storages)
            states.stored[key] = state, state_storages
            self._oldest[key] = states
            if self.max_states is not None:
                self._enforce_max_states(states, self.max_states)
            if self.max_total_states is not None:
                self._enforce_max_total(self.max_total_states)
            if self._nbytes > self._limit:
                self._make_room()
            return key

    def add_gradient(self, key: int, gradient: Any) -> bool:
        """Add a gradient, which is known after backward, to a state by the key that `add` returned.

        Return whether the state is still there and has it now.
        """
        with self._lock:
            states = self._oldest.get(key)
            if states is None:
                return False
            state, released = states.stored[key]
            before = state.contents()[-1]
            state.gradient = gradient
            held = storages(state.contents())
            is_full = self._nbytes + self._count_new(held) > self._limit
            is_too_large = sum(size for size, _ in held.values()) > self._limit
            if is_too_large or (is_full and self.policy == "error"):
                state.gradient = before
                problem = f"with its gradient would exceed memory_limit, {self._limit} bytes"
                if self.policy == "error":
                    raise StoreFullError(_full(states, problem))
                _warn(states, f"{problem}. It was not added")
                return False
            self._hold(held)
            self._release(released)
            states.stored[key] = state, held
            self._make_room()
            return key in states.stored

    # -- reading

    def states(self, probe: str, module: str | None = None) -> list[CapturedState]:
        """Return a probe's states, or those of one module, oldest first."""
        with self._lock:
            if probe not in self._probes:
                return []
            states = [state for state, _ in self._probes[probe].stored.values()]
        return [state for state in states if module is None or state.module == module]

    def counts(self, probe: str | None = None) -> Counts:
        """Return how many states of a probe, or of all together, there were and where they are."""
        with self._lock:
            if probe is not None:
                return self._probes[probe].counts() if probe in self._probes else Counts()
            each = [states.counts() for states in self._probes.values()]
            return Counts(*map(sum, zip(*each, strict=True))) if each else Counts()

    def over_limits(self, probe: str) -> tuple[int, int]:
        """Return how many states of a probe were dropped for bytes, and for `max_total_states`."""
        with self._lock:
            states = self._probes.get(probe)
            return (0, 0) if states is None else (states.over_memory, states.over_total)

    @property
    def nbytes(self) -> int:
        """The exact number of bytes kept in memory."""
        with self._lock:
            return self._nbytes

    # -- removing

    def clear(self, probe: str | None = None) -> None:
        """Free a probe's states, or all; the counts are kept."""
        with self._lock:
            for states in [s for name, s in self._probes.items() if probe in (None, name)]:
                states.cleared += len(states.stored)
                while states.stored:
                    self._free_oldest(states)

    def forget(self, probe: str) -> None:
        """Free everything of a probe, also its counts."""
        with self._lock:
            self.clear(probe)
            self._probes.pop(probe, None)

    def close(self) -> None:
        """Free everything; nothing can be added afterwards."""
        with self._lock:
            self._closed = True
            for probe in list(self._probes):
                self.forget(probe)

    # -- within the limits

    def _raise_if_full(self, states: _ProbeStates, new: _Storages) -> None:
        needed = self._nbytes + self._count_new(new)
        if needed > self._limit:
            problem = f"would take {needed} bytes, but memory_limit is {self._limit}"
        elif self.max_states is not None and len(states.stored) >= self.max_states:
            problem = f"would be one more than max_states, {self.max_states}"
        elif self.max_total_states is not None and len(self._oldest) >= self.max_total_states:
            problem = f"would be one more than {self.max_total_states} of all probes together"
        else:
            return
        states.dropped += 1
        raise StoreFullError(_full(states, problem))

    def _enforce_max_states(self, states: _ProbeStates, max_states: int) -> None:
        """Enforce the limit on the number of states, every `cleanup_interval` captures."""
        states.since_cleanup += 1
        if states.since_cleanup >= self.cleanup_interval:
            states.since_cleanup = 0
            while len(states.stored) > max_states:
                self._free_oldest(states)
                states.dropped += 1

    def _enforce_max_total(self, max_states: int) -> None:
        self._since_cleanup += 1
        if self._since_cleanup >= self.cleanup_interval:
            self._since_cleanup = 0
            while len(self._oldest) > max_states:
                states = next(iter(self._oldest.values()))
                self._free_oldest(states)
                states.dropped += 1
                states.over_total += 1

    def _make_room(self) -> None:
        """Enforce the limit on bytes. States that share memory free it with the last of them."""
        while self._nbytes > self._limit:
            states = next(iter(self._oldest.values()))
            self._free_oldest(states)
            states.dropped += 1
            states.over_memory += 1

    def _free_oldest(self, states: _ProbeStates) -> None:
        key, (_, released) = states.stored.popitem(last=False)
        del self._oldest[key]
        self._release(released)

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

    def _count_new(self, held: _Storages) -> int:
        """Return how many bytes `_hold` would add."""
        return sum(size for key, (size, _) in held.items() if key not in self._holders)


def check_limit(name: str, value: Any, *, optional: bool = True) -> None:
    """Raise unless a limit is a positive integer, or None."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        none = " or None" if optional else ""
        raise ConfigError(f"{name} must be a positive integer{none}, not {show_value(value)}.")


def _warn(states: _ProbeStates, problem: str) -> None:
    if not states.warned:
        states.warned = True
        log.warning(
            "Probe '%s': a state %s. This warning is shown once. Capture less (a slice, another "
            "dtype, fewer modules) or raise the limit.",
            states.probe,
            problem,
        )


def _full(states: _ProbeStates, problem: str) -> str:
    return (
        f"Probe '{states.probe}' has captured a state that {problem}. Clear states, capture less, "
        "raise the limit, or use policy='drop_oldest'."
    )
