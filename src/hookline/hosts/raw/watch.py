"""What PyTorch's own hooks tell of the model: its outermost call, and the end of backward.

Taps are put on and taken off as hooks ask for them. Nothing is wrapped or replaced.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

__all__ = ["ModelWatch", "Tap", "tensors_in"]


class Tap:
    """A callable for PyTorch's hooks, kept out of compiled graphs.

    In a copy or a pickle of the model it does nothing.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @_disable_dynamo  # as torch.optim does: torch.compiler.disable would import dynamo right now
    def __call__(self, *args: Any) -> Any:
        """Pass the call on."""
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Tap:
        return Tap(_nothing)

    def __reduce__(self) -> Any:
        return Tap, (_nothing,)


def _nothing(*args: Any) -> None:
    """Stands where a tap was."""


class ModelWatch:
    """Calls back when the model's outermost call begins and returns, and around backward.

    A call under `no_grad` is not training and is not told. The recomputation of activation
    checkpointing is no call of the user's and is not told either.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        before_forward: Callable[[], None],
        after_forward: Callable[[Any], None],
        backward_begins: Callable[[], None],
        backward_ends: Callable[[], None],
    ) -> None:
        self.model = model
        self.calls_seen = 0
        self.backwards_seen = 0
        self._told = (before_forward, after_forward, backward_begins, backward_ends)
        self._handles: list[RemovableHandle] = []
        self._outputs: deque[RemovableHandle] = deque(maxlen=64)
        self._depth = 0
        self._raised: BaseException | None = None
        self._task = -1
        self._sees_backward = False

    @property
    def on(self) -> bool:
        """Whether the model is being watched."""
        return bool(self._handles)

    def put_on(self, *, backward: bool) -> None:
        """Watch the model's calls and, if asked, backward through what they return."""
        self._sees_backward = backward
        if not self._handles:
            self._depth = 0
            self._handles = [
                self.model.register_forward_pre_hook(Tap(self._before)),
                # always_call: a forward that raises must not leave the count of depth behind
                self.model.register_forward_hook(Tap(self._after), always_call=True),
            ]

    def take_off(self) -> None:
        """Take everything off the model and off what it returned lately."""
        for handle in (*self._handles, *self._outputs):
            handle.remove()
        self._handles = []
        self._outputs.clear()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._depth += 1
        if self._depth == 1:
            self._raised = sys.exc_info()[1]  # a loop may call the model while handling an error
            self.calls_seen += 1
            self._told[0]()

    def _after(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if self._depth == 0 or torch._C._current_graph_task_id() != -1:
            return
        self._depth -= 1
        if self._depth == 0 and sys.exc_info()[1] is self._raised:
            self._raised = None
            if self._sees_backward:
                self._watch_backward(outputs)
            self._told[1](outputs)

    def _watch_backward(self, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                self._outputs.append(tensor.register_hook(self._gradient_arrives))

    def _gradient_arrives(self, grad: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if not self._handles or task == self._task:
            return
        self._task = task
        self.backwards_seen += 1
        self._told[2]()
        _queue(self._backward_done)

    def _backward_done(self) -> None:
        # Under DDP, gradients are averaged in a callback that is queued later than this one.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            _queue(self._told[3])
        else:
            self._told[3]()


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a model's output: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
