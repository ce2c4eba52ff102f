"""The store of captured states: keeps them within limits and counts what did not fit.

A captured state is a module's input, output and gradient in one call.
"""

from __future__ import annotations

import logging
import math
import time as _time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import count
from threading import RLock
from typing import Any, NamedTuple

from torch import Tensor

from hookline.arguments import check_whole_number
from hookline.tensors.memory import storages
from hookline.tensors.nested import tensors_in

log = logging.getLogger("hookline")

MAX_CAPTURED_STATES = 1000
"""The default of a manager of probes, over all its hooks."""

CONTENTS = ("input", "kwargs", "output", "gradient")
"""The fields that hold what was captured; the others say where and when."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class CapturedState(Mapping[str, Any]):
    """The captured contents of one call of a module. Also a mapping: `state["output"]`.

    Tensors are where they were: in tuples, dicts, objects and so on. What was not captured is None.

    Args:
        module: The module's name.
        probe: The probe's name.
        step: The number of optimizer steps completed before the call; None outside of training.
        epoch: The epoch; None outside of training.
        call: The number of the module's call, from 0, within the model's outermost call; in
            training where that is not seen, within the step. For a manager each module is a model
            of its own, so there it is 0 unless the module calls itself.
        layer_idx: The layer's number, as given to the probe, or the first in the module's name.
        time: When, in seconds since 1970.
        input: The positional arguments.
        kwargs: The keyword arguments.
        output: What the module returned.
        gradient: The gradient of the output.
    """

    module: str
    probe: str = ""
    step: int | None = None
    epoch: int | None = None
    call: int = 0
    layer_idx: int | None = None
    time: float = field(default_factory=_time.time)
    input: Any = None
    kwargs: Any = None
    output: Any = None
    gradient: Any = None

    def contents(self) -> tuple[Any, ...]:
        """Return what was captured, in the order of `CONTENTS`."""
        return self.input, self.kwargs, self.output, self.gradient

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors within, each as often as it occurs."""
        return tensors_in(self.contents())

    @property
    def nbytes(self) -> int:
        """The bytes that the state keeps alive: whole storages, also of views, each once."""
        return sum(size for size, _ in storages(self.contents()).values())

    def __getitem__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FIELDS)

    def __len__(self) -> int:
        return len(_FIELDS)

    def __eq__(self, other: object) -> bool:
        return self is other  # that of Mapping would compare tensors

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        names = ("probe", "step", "epoch", "call", "layer_idx")
        where = [f"{name}={self[name]!r}" for name in names if self[name] is not None]
        values = zip(CONTENTS, self.contents(), strict=True)
        captured = [f"{name}={_with_shapes(value)}" for name, value in values if value is not None]
        return f"CapturedState({', '.join([repr(self.module), *where, *captured])})"


_FIELDS = {f.name: None for f in fields(CapturedState)}


def shape_text(tensor: Any) -> str:
    """Return dtype and shape of a tensor as text: `float32[2, 3]`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if getattr(tensor, "is_nested", False):  # it has no shape, or one with symbols
        return f"nested {dtype}[{tensor.size(0)}, …]"
    return f"{dtype}{list(tensor.shape)}"


def _with_shapes(value: Any) -> str:
    """Return the repr of a value with shapes instead of tensors."""
    if isinstance(value, Tensor):
        return shape_text(value)
    if type(value) in (tuple, list):
        inside = ", ".join(map(_with_shapes, value))
        one = "," if len(value) == 1 else ""
        return f"[{inside}]" if type(value) is list else f"({inside}{one})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_with_shapes(v)}' for key, v in value.items())}}}"
    shapes = ", ".join(map(shape_text, tensors_in(value)))
    return f"<{type(value).__name__} of {shapes}>" if shapes else repr(value)


# -- the store -----------------------------------------------------------------------------------


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

    probe: Hashable
    state: CapturedState
    held: _Storages


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
        for name, limit in (("max_states", max_states), ("memory_limit", memory_limit)):
            if limit is not None:
                check_whole_number(name, limit, 1)
        check_whole_number("cleanup_interval", cleanup_interval, 1)
        self.max_states = max_states
        self.memory_limit = memory_limit
        self.cleanup_interval = cleanup_interval
        self._limit = math.inf if memory_limit is None else memory_limit
        self._since_cleanup = 0
        self._lock = RLock()
        self._nbytes = 0
        self._holders: dict[Any, int] = {}  # the number of states, by storage
        self._stored: OrderedDict[int, _Stored] = OrderedDict()  # by key, oldest first
        self._counts: dict[Hashable, Counter[str]] = defaultdict(Counter)
        self._warned: set[Hashable] = set()  # probes whose states do not fit
        self._keys = count()

    # -- adding

    def add(self, probe: Hashable, state: CapturedState) -> int:
        """Keep a probe's state, make room for it, and return its key, also if it was dropped."""
        held = storages(state.contents())
        with self._lock:
            counts = self._counts[probe]
            counts["captured"] += 1
            key = next(self._keys)
            stored = _Stored(probe, state, held)
            if self._is_too_large(held):
                counts["dropped"] += 1
                self._warn(stored, self._memory_limit_text)
            else:
                self._hold(held)
                self._stored[key] = stored
                self._clean_up()
                self._make_room()
            return key

    def add_gradient(self, key: int, gradient: Any) -> bool:
        """Add a gradient, which is known after backward, to a state by the key that `add` returned.

        Return whether the state is still there and has it now.
        """
        with self._lock:
            stored = self._stored.get(key)
            if stored is None:
                return False
            state, (*others, _) = stored.state, stored.state.contents()
            held = storages((*others, gradient))
            if self._is_too_large(held):
                self._warn(stored, self._memory_limit_text)
                return False
            state.gradient = gradient
            self._hold(held)
            self._release(stored.held)
            self._stored[key] = stored._replace(held=held)
            self._make_room()
            return key in self._stored

    # -- reading

    def states(self, probe: Hashable, module: str | None = None) -> list[CapturedState]:
        """Return a probe's states, or those of one module, oldest first.

        `probe` is the key they were added with; those of a `Capture` are in `capture.states()`.
        """
        with self._lock:
            states = [one.state for one in self._stored.values() if one.probe == probe]
        return [state for state in states if module is None or state.module == module]

    def counts(self, probe: Hashable = None) -> Counts:
        """Return how many states of a probe, or of all together, there were and where they are."""
        with self._lock:
            several = (c for name, c in self._counts.items() if probe in (None, name))
            total = sum(several, Counter[str]())
        kept = total["captured"] - total["dropped"] - total["cleared"]
        return Counts(total["captured"], kept, total["dropped"], total["cleared"])

    @property
    def nbytes(self) -> int:
        """The exact number of bytes kept in memory."""
        with self._lock:
            return self._nbytes

    # -- removing

    def clear(self, probe: Hashable = None) -> None:
        """Free a probe's states, or all; the counts are kept."""
        with self._lock:
            keys = [key for key, one in self._stored.items() if probe in (None, one.probe)]
            for key in keys:
                self._free(key, "cleared")

    def forget(self, probe: Hashable) -> None:
        """Free everything of a probe, also its counts."""
        with self._lock:
            self.clear(probe)
            self._counts.pop(probe, None)
            self._warned.discard(probe)

    # -- within the limits

    def _clean_up(self) -> None:
        """Drop the oldest states above `max_states`, once in `cleanup_interval` captures."""
        self._since_cleanup += 1
        if self.max_states is None or self._since_cleanup < self.cleanup_interval:
            return
        self._since_cleanup = 0
        while len(self._stored) > self.max_states:
            dropped = self._drop_oldest()
            if self.max_states == MAX_CAPTURED_STATES:  # one that the user chose needs no warning
                self._warn(dropped, f"max_captured_states={self.max_states}")

    def _make_room(self) -> None:
        """Drop the oldest states. Those that share memory free it with the last of them."""
        while self._nbytes > self._limit:
            self._warn(self._drop_oldest(), self._memory_limit_text)

    def _drop_oldest(self) -> _Stored:
        return self._free(next(iter(self._stored)), "dropped")

    def _is_too_large(self, held: _Storages) -> bool:
        """Return whether one state alone exceeds the limit on bytes."""
        nbytes = 0
        for size, _ in held.values():  # faster than `sum`, at each capture
            nbytes += size
        return nbytes > self._limit

    @property
    def _memory_limit_text(self) -> str:
        return f"memory_limit_mb={self._limit / 2**20:g}"

    def _warn(self, dropped: _Stored, limit: str) -> None:
        """Warn once for each probe that states do not fit."""
        if dropped.probe not in self._warned:
            self._warned.add(dropped.probe)
            log.warning(
                "The probe '%s' drops captured states that do not fit, the oldest first, because "
                "of %s. Raise the limit (None: no limit) or capture less (a slice, another dtype, "
                "fewer modules, fewer steps). Its counts say how many were dropped.",
                dropped.state.probe,
                limit,
            )

    def _free(self, key: int, reason: str) -> _Stored:
        """Remove a state, count it, and return it."""
        stored = self._stored.pop(key)
        self._release(stored.held)
        self._counts[stored.probe][reason] += 1
        return stored

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
