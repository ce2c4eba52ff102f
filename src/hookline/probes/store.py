"""The store of captured states: keeps them within limits and counts what did not fit."""

from __future__ import annotations

import heapq
import logging
import math
import os
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from threading import RLock
from typing import Any, overload

from hookline.errors import ArgumentError, HookFailedError, HooklineError, listed
from hookline.probes.captured_state import CONTENTS, CapturedState
from hookline.probes.store_options import Policy, check_store_options
from hookline.probes.stored_state import (
    Counts,
    ProbeStates,
    SpilledState,
    SpillError,
    StorageCounter,
    StoredState,
    make_folder,
    remove_folder,
    write_state,
)
from hookline.tensors.memory import storages

__all__ = ["Counts", "Policy", "Store", "StoreFullError"]

log = logging.getLogger("hookline")


class StoreFullError(HookFailedError, MemoryError):
    """A state does not fit into the store, and nothing may be dropped. Training stops."""


class Store:
    """Keeps captured states within limits. Safe to use from several threads.

    The bytes that are counted are those kept alive: whole storages, also of views, each once,
    however many states share it. They are within `memory_limit` whenever a call returns. Objects
    other than tensors are not counted.

    Args:
        max_states: How many states of each probe to keep in memory; None for all.
        memory_limit: How many bytes to keep in memory, over all probes; None for no limit.
        policy: What happens to states that do not fit:

            - `"drop_oldest"`: the oldest state is dropped; for bytes, the oldest of all probes;
            - `"sample"`: a uniform random sample of all that a probe has captured is kept. For
              bytes, the probe that holds the most drops a state first;
            - `"spill"`: the oldest is written to disk and read back on demand. Only what cannot be
              written is dropped;
            - `"error"`: `StoreFullError` is raised, and the states before are kept.
        cleanup_interval: How many captures to wait between two checks of `max_states` (captures of
            the probe) and `max_total_states` (of all): in between, up to `cleanup_interval - 1`
            more are kept. The limit on bytes, and the policy `"error"`, are always checked at once.
        folder: Where `"spill"` writes, in a new folder that `close` removes; by default the
            system's folder for temporary files.
        seed: The seed of `"sample"`: the same captures and seed give the same sample. Other random
            generators are not touched.
        max_total_states: How many states to keep in memory, over all probes; None for all. With
            `"sample"`, the probe that holds the most states drops one first.
    """

    def __init__(
        self,
        max_states: int | None = None,
        memory_limit: int | None = None,
        policy: Policy = "drop_oldest",
        cleanup_interval: int = 1,
        folder: str | os.PathLike[str] | None = None,
        seed: int = 0,
        max_total_states: int | None = None,
    ) -> None:
        limits = {
            "max_states": max_states,
            "memory_limit": memory_limit,
            "max_total_states": max_total_states,
        }
        check_store_options(limits, policy, cleanup_interval, folder)
        self.max_states = max_states
        self.max_total_states = max_total_states
        self._since_cleanup = 0
        self.memory_limit = memory_limit
        self.policy: Policy = policy
        self.cleanup_interval = cleanup_interval
        self.seed = seed
        self._limit = math.inf if memory_limit is None else memory_limit
        self._makes_room = policy in ("drop_oldest", "spill")  # for each new state
        self._lock = RLock()
        self._storages = StorageCounter()
        self._probes: dict[str, ProbeStates] = {}
        # The probe of each state in memory, by key, oldest first.
        self._oldest: OrderedDict[int, ProbeStates] = OrderedDict()
        self._keys = count()
        self._files = count()
        self._closed = False
        self.folder = make_folder(folder) if policy == "spill" else None
        """Where spilled states are written."""
        self._process = os.getpid()
        self._remove_folder = weakref.finalize(self, remove_folder, self.folder, self._process)

    # -- adding

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
                # A generator for each: what other probes capture does not change its sample.
                generator = random.Random(f"{self.seed} {probe}")
                states = self._probes[probe] = ProbeStates(probe, generator)
            states.captured += 1
            stored = StoredState(next(self._keys), state, state_storages, nbytes)
            if (self._makes_room and nbytes <= self._limit) or self._fits(states, stored):
                self._keep(states, stored)
            if self.max_states is not None:
                self._enforce_max_states(states, self.max_states)
            if self.max_total_states is not None:
                self._enforce_max_total(self.max_total_states)
            if self._storages.nbytes > self._limit:
                self._make_room()
            return stored.key

    def add_fields(self, key: int, **contents: Any) -> bool:
        """Add contents to a state that `add` returned the key of, within the limits.

        Return whether the state is still there and has them now: `input`, `kwargs`, `output` or
        `gradient`, which is only known after backward.
        """
        if unknown := [name for name in contents if name not in CONTENTS]:
            raise ArgumentError(f"Cannot add {listed(unknown)}, only {listed(CONTENTS)}.")
        with self._lock:
            states = self._oldest.get(key)
            if states is not None:
                return self._add_in_memory(states, states.memory[key], contents)
            for states in self._probes.values():
                if key in states.disk:
                    return self._add_on_disk(states, states.disk[key], contents)
            return False

    # -- reading

    def states(self, probe: str) -> list[CapturedState]:
        """Return a probe's states, oldest first; spilled ones are read back, all at once."""
        return self.get(probe, slice(None))

    def iter_states(self, probe: str, module: str | None = None) -> Iterator[CapturedState]:
        """Yield a probe's states, or one module's; spilled ones are read one at a time."""
        with self._lock:
            keys = [stored.key for stored in self._stored(probe, module)]
        for key in keys:
            with self._lock:
                states = self._probes.get(probe)
                stored = states and (states.memory.get(key) or states.disk.get(key))
                if not stored:  # removed in the meantime
                    continue
                state = stored.read()
            yield state

    @overload
    def get(self, probe: str, index: int, module: str | None = None) -> CapturedState: ...
    @overload
    def get(self, probe: str, index: slice, module: str | None = None) -> list[CapturedState]: ...
    def get(
        self, probe: str, index: int | slice, module: str | None = None
    ) -> CapturedState | list[CapturedState]:
        """Return a probe's state, or states, by index; no others are read from disk."""
        with self._lock:
            found = self._stored(probe, module)[index]
            return [stored.read() for stored in found] if isinstance(found, list) else found.read()

    def metadata(self, probe: str, module: str | None = None) -> list[CapturedState]:
        """Return a probe's states without reading from disk: those have shapes for tensors."""
        with self._lock:
            return [stored.metadata for stored in self._stored(probe, module)]

    def _stored(self, probe: str, module: str | None) -> list[StoredState]:
        """Return a probe's states, or one module's, oldest first."""
        if probe not in self._probes:
            return []
        states = self._probes[probe]
        stored = (*states.memory.values(), *states.disk.values())
        found = [entry for entry in stored if module is None or entry.metadata.module == module]
        return sorted(found, key=lambda entry: entry.key)

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
            return self._storages.nbytes

    # -- removing

    def clear(self, probe: str | None = None) -> None:
        """Free a probe's states, or all; the counts are kept. A sample starts over."""
        with self._lock:
            for states in [s for name, s in self._probes.items() if probe in (None, name)]:
                states.cleared += len(states.memory) + len(states.disk)
                for stored in list(states.memory.values()):
                    self._free(states, stored)
                while states.disk:
                    self._remove_file(states.disk.popitem()[1])
                states.highest.clear()
                states.below = math.inf

    def forget(self, probe: str) -> None:
        """Free everything of a probe, also its files and counts."""
        with self._lock:
            self.clear(probe)
            self._probes.pop(probe, None)

    def close(self) -> None:
        """Free everything and remove the folder of spilled states."""
        with self._lock:
            self._closed = True
            for probe in list(self._probes):
                self.forget(probe)
            self._remove_folder()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        counts = self.counts()
        return f"<Store of {len(self._probes)} probes, {self.nbytes} bytes, {counts}>"

    # -- within the limits

    def _fits(self, states: ProbeStates, stored: StoredState) -> bool:
        """Return whether to keep a new state in memory; if not, it was spilled or dropped."""
        if self.policy == "sample":
            stored.rank = states.random.random()
        if self.policy == "error":
            self._raise_if_full(states, stored)
        elif stored.nbytes > self._limit and self.policy == "spill":
            self._spill(states, stored)
            return False
        elif stored.nbytes > self._limit:
            states.dropped += 1
            self._warn(
                states,
                f"a state has {stored.nbytes} bytes, but memory_limit is {self._limit}. It was "
                "dropped",
            )
            return False
        elif stored.rank >= states.below:
            states.dropped += 1
            return False
        return True

    def _raise_if_full(self, states: ProbeStates, stored: StoredState) -> None:
        needed = self._storages.nbytes + self._storages.count_new(stored.storages)
        if needed > self._limit:
            problem = f"would take {needed} bytes, but memory_limit is {self._limit}"
        elif self.max_states is not None and len(states.memory) >= self.max_states:
            problem = f"would be one more than max_states, {self.max_states}"
        elif self.max_total_states is not None and len(self._oldest) >= self.max_total_states:
            problem = f"would be one more than {self.max_total_states} of all probes together"
        else:
            return
        states.dropped += 1
        raise StoreFullError(_full(states, problem))

    def _keep(self, states: ProbeStates, stored: StoredState) -> None:
        self._storages.hold(stored.storages)
        states.nbytes += stored.nbytes
        states.memory[stored.key] = stored
        self._oldest[stored.key] = states
        if self.policy == "sample":
            heapq.heappush(states.highest, (-stored.rank, stored.key))

    def _free(self, states: ProbeStates, stored: StoredState) -> None:
        del states.memory[stored.key], self._oldest[stored.key]
        states.nbytes -= stored.nbytes
        self._storages.release(stored.storages)

    def _enforce_max_states(self, states: ProbeStates, max_states: int) -> None:
        """Enforce the limit on the number of states, every `cleanup_interval` captures."""
        states.since_cleanup += 1
        if states.since_cleanup >= self.cleanup_interval:
            states.since_cleanup = 0
            while len(states.memory) > max_states:
                self._evict(states)

    def _enforce_max_total(self, max_states: int) -> None:
        self._since_cleanup += 1
        if self._since_cleanup >= self.cleanup_interval:
            self._since_cleanup = 0
            while len(self._oldest) > max_states:
                states = self._next_to_evict(lambda states: len(states.memory))
                states.over_total += self._evict(states)

    def _make_room(self) -> None:
        """Enforce the limit on bytes. States that share memory free it with the last of them."""
        while self._storages.nbytes > self._limit:
            states = self._next_to_evict(lambda states: states.nbytes)
            states.over_memory += self._evict(states)

    def _next_to_evict(self, size: Callable[[ProbeStates], int]) -> ProbeStates:
        """Return the probe that drops a state: that of the oldest, or for a sample the largest."""
        if self.policy == "sample":
            return max(self._probes.values(), key=size)
        return next(iter(self._oldest.values()))

    def _evict(self, states: ProbeStates) -> bool:
        """Drop or spill one of a probe's states: the oldest, or that of the highest rank.

        Return whether it was dropped.

        A sample keeps the lowest ranks. A rank that was once too high is too high for later states
        as well, or these would have better chances than those before.
        """
        if self.policy == "sample":
            below, key = heapq.heappop(states.highest)
            states.below = -below
        else:
            key = next(iter(states.memory))
        stored = states.memory[key]
        self._free(states, stored)
        if self.policy == "spill":
            self._spill(states, stored)
            return False
        states.dropped += 1
        return True

    def _spill(self, states: ProbeStates, stored: StoredState) -> None:
        try:
            states.disk[stored.key] = self._write(stored.key, stored.read())
        except SpillError as error:
            states.dropped += 1
            self._warn(states, f"{error}. It was dropped")
        except BaseException:  # such as KeyboardInterrupt while writing
            states.dropped += 1
            raise

    def _write(self, key: int, state: CapturedState) -> StoredState:
        assert self.folder is not None
        path = self.folder / f"{next(self._files)}.safetensors"
        return StoredState(key, write_state(state, path), {}, 0)

    def _add_in_memory(
        self, states: ProbeStates, stored: StoredState, contents: dict[str, Any]
    ) -> bool:
        state = stored.state
        assert isinstance(state, CapturedState)
        values = zip(CONTENTS, state.contents(), strict=True)  # without checks: nothing waits
        before = {name: value for name, value in values if name in contents}
        _set(state, contents)
        state_storages = storages(state.contents())
        is_full = self._storages.nbytes + self._storages.count_new(state_storages) > self._limit
        is_too_large = _size(state_storages) > self._limit
        if (is_full and self.policy == "error") or (is_too_large and self.policy != "spill"):
            _set(state, before)
            problem = f"with its {listed(contents)} would exceed memory_limit, {self._limit} bytes"
            if self.policy == "error":
                raise StoreFullError(_full(states, problem))
            self._warn(states, f"a state {problem}. It was not added")
            return False
        self._storages.hold(state_storages)
        self._storages.release(stored.storages)
        states.nbytes += _size(state_storages) - stored.nbytes
        stored.storages, stored.nbytes = state_storages, _size(state_storages)
        self._make_room()
        return stored.key in states.memory or stored.key in states.disk

    def _add_on_disk(
        self, states: ProbeStates, stored: StoredState, contents: dict[str, Any]
    ) -> bool:
        state = stored.read()
        _set(state, contents)
        try:
            states.disk[stored.key] = self._write(stored.key, state)
        except SpillError as error:
            self._warn(states, f"{error}. Its {listed(contents)} was not added")
            return False
        self._remove_file(stored)
        return True

    def _remove_file(self, stored: StoredState) -> None:
        if isinstance(stored.state, SpilledState) and os.getpid() == self._process:
            stored.state.path.unlink(missing_ok=True)  # a forked worker's parent still needs it

    def _warn(self, states: ProbeStates, problem: str) -> None:
        if not states.warned:
            states.warned = True
            log.warning(
                "Probe '%s': %s. This warning is shown once. Capture less (a slice, another dtype, "
                "fewer modules) or raise the limit.",
                states.probe,
                problem,
            )


def _full(states: ProbeStates, problem: str) -> str:
    return (
        f"Probe '{states.probe}' has captured a state that {problem}. Clear states, capture less, "
        "raise the limit, or use policy='drop_oldest', 'sample' or 'spill'."
    )


def _size(state_storages: dict[Any, tuple[int, Any]]) -> int:
    return sum(size for size, _ in state_storages.values())


def _set(state: CapturedState, contents: dict[str, Any]) -> None:
    for name, value in contents.items():
        setattr(state, name, value)
