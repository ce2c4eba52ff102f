"""Captures the gradients of a module's output and adds them to the state of its call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType

from torch import Tensor

from hookline.probes.captured_state import CapturedState, Check, LazyState
from hookline.probes.extractor import TensorExtractor
from hookline.probes.output_gradient import on_gradient
from hookline.probes.store import Store
from hookline.tensors.nested import map_tensors

__all__ = ["OutputGradients"]


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """Takes the place of a tensor whose gradient is expected."""

    tensor_id: int


@dataclass(slots=True, eq=False)
class OutputGradients:
    """The gradients of one output, which are added to the state of its call in backward.

    Args:
        name: The module's name.
        extractor: Extracts what is kept of a gradient.
        store: The store that has the state.
        key: The state's key there.
        state: A weak reference to the state, which may be dropped before backward.
        guard: Calls a function and isolates its failures.
    """

    name: str
    extractor: TensorExtractor
    store: Store
    key: int
    state: ReferenceType[CapturedState]
    guard: Callable[..., Any]
    structure: Any = field(init=False)  # of the output, with placeholders
    gradients: dict[int, Any] = field(init=False)
    checks: dict[int, Check] = field(init=False)
    lock: threading.Lock = field(init=False)  # backward has a thread for each device

    def expect(self, output: Any, tensors: list[Tensor]) -> None:
        """Wait for the gradients of some tensors in what a module returned."""
        self.gradients, self.checks, self.lock = {}, {}, threading.Lock()
        self.structure = map_tensors(output, lambda tensor: _Placeholder(id(tensor)))
        for tensor_id, tensor in {id(tensor): tensor for tensor in tensors}.items():
            on_gradient(tensor, partial(self._on_gradient, tensor_id))

    def _on_gradient(self, tensor_id: int, gradient: Tensor) -> None:
        self.guard(self._add, (tensor_id, gradient))

    def _add(self, tensor_id_and_gradient: tuple[int, Tensor]) -> None:
        """Add the gradient of one tensor; those that are not there yet are None."""
        tensor_id, gradient = tensor_id_and_gradient
        with self.lock:
            self.gradients[tensor_id], check = self.extractor.extract(gradient, self.name)
            if check is not None:
                self.checks[tensor_id] = check
            gradients = map_tensors(
                self.structure, lambda p: self.gradients.get(p.tensor_id), leaf=_Placeholder
            )
            self._handle_checks()
            if not self.store.add_fields(self.key, gradient=gradients):
                self.gradients.clear()  # the state was dropped: free what cannot be read

    def _handle_checks(self) -> None:
        checks, state = list(self.checks.values()), self.state()
        if checks and self.store.policy == "spill":  # it may be written at once
            _run(checks)
        elif checks and isinstance(state, LazyState):
            state.checks["gradient"] = partial(_run, checks)


def _run(checks: list[Check]) -> None:
    for check in checks:
        check()
