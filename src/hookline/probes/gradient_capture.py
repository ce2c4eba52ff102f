"""Captures the gradients of a module's output and adds them to the state of its call."""

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

__all__ = ["capture_gradients"]


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """Takes the place of a tensor whose gradient is expected."""

    tensor_id: int


def capture_gradients(
    output: Any,
    name: str,
    extractor: TensorExtractor,
    store: Store,
    key: int,
    state: ReferenceType[CapturedState],
    guard: Callable[..., Any],
) -> None:
    """Add the gradients of an output to the state of its call, once backward computes them.

    Args:
        output: What a module returned; its leaf tensors are ignored.
        name: The module's name.
        extractor: Extracts what is kept of a gradient.
        store: The store that has the state.
        key: The state's key there.
        state: A weak reference to the state, which may be dropped before backward.
        guard: Calls a function and isolates its failures.
    """
    tensors = {id(t): t for t in tensors_in(output) if t.grad_fn is not None}
    if tensors:
        structure = map_tensors(output, lambda tensor: _Placeholder(id(tensor)))
        gradients = _OutputGradients(structure, name, extractor, store, key, state)
        for tensor_id, tensor in tensors.items():
            on_gradient(tensor, partial(_add_gradient, guard, gradients, tensor_id))


def _add_gradient(
    guard: Callable[..., Any], gradients: _OutputGradients, tensor_id: int, gradient: Tensor
) -> None:
    guard(gradients.add, (tensor_id, gradient))


class _OutputGradients:
    """The gradients of one output, in the structure of the output."""

    def __init__(
        self,
        structure: Any,
        name: str,
        extractor: TensorExtractor,
        store: Store,
        key: int,
        state: ReferenceType[CapturedState],
    ) -> None:
        self._structure = structure
        self._name = name
        self._extractor = extractor
        self._store = store
        self._key = key
        self._state = state
        self._lock = threading.Lock()  # backward has a thread for each device
        self._gradients: dict[int, Any] = {}
        self._checks: dict[int, Check] = {}

    def add(self, tensor_id_and_gradient: tuple[int, Tensor]) -> None:
        """Add the gradient of one tensor; those that are not there yet are None."""
        tensor_id, gradient = tensor_id_and_gradient
        with self._lock:
            extracted, check = self._extractor.extract(gradient, self._name)
            self._gradients[tensor_id] = extracted
            if check is not None:
                self._checks[tensor_id] = check
            gradients = map_tensors(
                self._structure, lambda p: self._gradients.get(p.tensor_id), leaf=_Placeholder
            )
            self._handle_checks()
            if not self._store.add_fields(self._key, gradient=gradients):
                self._gradients.clear()  # the state was dropped: free what cannot be read

    def _handle_checks(self) -> None:
        checks, state = list(self._checks.values()), self._state()
        if checks and self._store.policy == "spill":  # it may be written at once
            _run_checks(checks)
        elif checks and isinstance(state, LazyState):
            state.checks["gradient"] = partial(_run_checks, checks)


def _run_checks(checks: list[Check]) -> None:
    for check in checks:
        check()
