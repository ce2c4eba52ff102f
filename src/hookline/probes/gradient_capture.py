"""Gradients of outputs in backward: calls a function with one, or adds them to a captured state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from hookline.probes.captured_state import CapturedState, Check, LazyState
from hookline.probes.extractor import TensorExtractor, run_checks
from hookline.probes.store import Store
from hookline.tensors.nested import map_tensors


def on_gradient(tensor: Tensor, callback: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of a tensor, in each backward that reaches it.

    A leaf, such as a parameter, is ignored: its hook would never be freed, and its gradient is that
    of all its uses. Only the graph keeps what this registers, so it is freed with the graph.
    """
    if tensor.grad_fn is None:
        return
    base = tensor._base
    if base is None or not _is_plain_view(tensor, base):
        # The gradient is None for an output of an operation that nothing used.
        tensor.register_hook(lambda gradient: None if gradient is None else callback(gradient))
        return
    view = _View(tensor, base, callback)
    tensor.register_hook(view.on_gradient)
    base.register_hook(view.on_base_gradient)


def _is_plain_view(view: Tensor, base: Tensor) -> bool:
    """Return whether the elements of a view are elements of its base, unconverted.

    False within `torch.func`, whose tensors are wrappers.
    """
    is_plain = type(base) is Tensor and base.layout is torch.strided and not base.is_complex()
    return (
        is_plain
        and peek_interpreter_stack() is None
        and base.grad_fn is not None
        and base.dtype == view.dtype
        and base.numel() >= view.numel()
    )


def _is_view_of_linear(view: Tensor, base: Tensor) -> bool:
    """Return whether a linear layer made the view, so that nothing else uses its base."""
    view_fn, base_fn = view.grad_fn, base.grad_fn
    return (
        view_fn is not None
        and base_fn is not None
        and view_fn.next_functions[0][0] is base_fn
        and base_fn.name() == "AddmmBackward0"
    )


class _View:
    """The gradient of a view, such as a linear layer returns for a sequence.

    An in-place change of the view rebuilds its graph from the base on, and the hook on the view is
    not called any more. The gradient from before the change is then part of the gradient of the
    base, which also includes other uses of the base, and uses of the view before the change. If
    only the view can have been used, the gradient of the base is exact.
    """

    def __init__(self, view: Tensor, base: Tensor, callback: Callable[[Tensor], None]) -> None:
        self._callback = callback
        self._base_layout = (base.size(), base.stride())
        offset = view.storage_offset() - base.storage_offset()
        self._view_layout = (view.size(), view.stride(), offset)
        # Shares the version counter but not the memory.
        self._counter = view.detach()
        self._counter.data = view.new_empty(0)
        self._version = self._counter._version
        self._owns_base = _is_view_of_linear(view, base)
        self._task = -1

    @property
    def _changed(self) -> bool:
        return self._counter._version != self._version

    def on_gradient(self, gradient: Tensor | None) -> None:
        """Handle the view's own gradient, which is computed before that of the base."""
        if gradient is not None and not (self._owns_base and self._changed):
            self._task = torch._C._current_graph_task_id()
            self._callback(gradient)

    def on_base_gradient(self, gradient: Tensor | None) -> None:
        """Handle the gradient of the base, if there was none of the view in this backward."""
        is_done = self._task == torch._C._current_graph_task_id()
        if gradient is not None and not is_done and self._changed:
            strided = gradient.new_empty_strided(*self._base_layout).copy_(gradient)
            self._callback(strided.as_strided(*self._view_layout))


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """Takes the place of a tensor whose gradient is expected."""

    tensor_id: int


@dataclass(slots=True, eq=False)
class OutputGradients:
    """The gradients of one output, which are added to the state of its call in backward."""

    name: str  # the module's
    extractor: TensorExtractor
    store: Store
    key: int  # the state's key in the store
    state: ReferenceType[CapturedState]  # it may be dropped before backward
    guard: Callable[..., Any]
    structure: Any = None  # of the output, with placeholders
    gradients: dict[int, Any] = field(default_factory=dict[int, Any])
    checks: dict[int, Check] = field(default_factory=dict[int, Check])
    lock: threading.Lock = field(default_factory=threading.Lock)  # backward has several threads

    def expect(self, output: Any, tensors: list[Tensor]) -> None:
        """Wait for the gradients of some tensors in what a module returned."""
        self.structure = map_tensors(output, lambda tensor: _Placeholder(id(tensor)))
        for tensor_id, tensor in {id(tensor): tensor for tensor in tensors}.items():
            on_gradient(tensor, partial(self.guard, self._add, tensor_id))

    def _add(self, tensor_id: int, gradient: Tensor) -> None:
        """Add the gradient of one tensor; those that are not there yet are None."""
        with self.lock:
            self.gradients[tensor_id], check = self.extractor.extract(gradient, self.name)
            if check is not None:
                self.checks[tensor_id] = check
            gradients = map_tensors(
                self.structure, lambda p: self.gradients.get(p.tensor_id), leaf=_Placeholder
            )
            state, checks = self.state(), list(self.checks.values())
            if checks and isinstance(state, LazyState):
                state.checks["gradient"] = partial(run_checks, checks)
            if not self.store.add_gradient(self.key, gradients):
                self.gradients.clear()  # the state was dropped: free what cannot be read
