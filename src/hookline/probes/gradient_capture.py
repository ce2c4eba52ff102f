"""The gradient of what a module returned, brought to the state of its call when it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType

from torch import Tensor

from hookline.probes.captured_state import CapturedState, Check, LazyState
from hookline.probes.extractor import TensorExtractor
from hookline.probes.output_gradient import on_gradient
from hookline.probes.store import Store
from hookline.tensors.nested import map_tensors, tensors_in

__all__ = ["follow"]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands where a tensor was."""

    tensor: int


def follow(
    output: Any,
    name: str,
    take: TensorExtractor,
    store: Store,
    key: int,
    state: ReferenceType[CapturedState],
    guard: Callable[..., Any],
) -> None:
    """Bring the gradients of an output to its state.

    Args:
        output: what a module returned; tensors that nothing was computed for are left alone.
        name: the module's.
        take: how to take a gradient.
        store: where the state is.
        key: the state's number there.
        state: the state, not kept alive: it may have been dropped when the gradient comes.
        guard: calls what is to be isolated.
    """
    tensors = {id(t): t for t in tensors_in(output) if t.grad_fn is not None}
    if tensors:
        shape = map_tensors(output, lambda tensor: _Slot(id(tensor)))
        coming = _Coming(shape, name, take, store, key, state)
        for number, tensor in tensors.items():
            on_gradient(tensor, partial(_came, guard, coming, number))


def _came(guard: Callable[..., Any], coming: _Coming, number: int, gradient: Tensor) -> None:
    guard(coming.arrived, (number, gradient))


class _Coming:
    """The gradients of one output, as they arrive."""

    def __init__(
        self,
        shape: Any,
        name: str,
        take: TensorExtractor,
        store: Store,
        key: int,
        state: ReferenceType[CapturedState],
    ) -> None:
        self._shape = shape
        self._name = name
        self._take = take
        self._store = store
        self._key = key
        self._state = state
        self._lock = threading.Lock()  # each device has a thread of its own in backward
        self._arrived: dict[int, Any] = {}
        self._checks: dict[int, Check] = {}

    def arrived(self, one: tuple[int, Tensor]) -> None:
        """One of them is there; the others are None until they are, too."""
        number, gradient = one
        with self._lock:
            taken, check = self._take(gradient, self._name)
            self._arrived[number] = taken
            if check is not None:
                self._checks[number] = check
            whole = map_tensors(
                self._shape, lambda slot: self._arrived.get(slot.tensor), leaf=_Slot
            )
            self._look_after()
            if not self._store.add_fields(self._key, gradient=whole):
                self._arrived.clear()  # the state is gone: do not keep what nobody can read

    def _look_after(self) -> None:
        checks, state = list(self._checks.values()), self._state()
        if checks and self._store.policy == "spill":  # it may be written right away
            _run(checks)
        elif checks and isinstance(state, LazyState):
            state.checks["gradient"] = partial(_run, checks)


def _run(checks: list[Check]) -> None:
    for check in checks:
        check()
