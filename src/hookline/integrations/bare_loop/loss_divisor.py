"""By which constant a loop has divided its loss before backward.

Under gradient accumulation most loops call `(loss / n).backward()`. The division is the last
operation of the loss's graph, with its constant saved there. Autograd frees it as soon as it has
passed that operation, before it reaches the model. Therefore the function that starts autograd's
engine is replaced while at least one user is there, and restored when the last one leaves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["LossGraph", "find_divisor", "is_compiled", "read_graphs", "running_graph"]

_COMPILED = "CompiledFunctionBackward"


def find_divisor(loss: torch.Tensor, *, is_scaled: bool = False) -> float | None:
    """Return the constant that the loss was divided by last; None without a division.

    Multiplying by a constant counts as dividing by its inverse. A constant on an accelerator is
    never read, because that would wait for the device.

    Args:
        loss: the tensor that backward is called on.
        is_scaled: whether a `GradScaler` has multiplied it by its scale after the loop's own
            operations.
    """
    node = _last_operation(loss, is_scaled)
    while _name(node) == "ToCopyBackward0":  # `.float()` of a divided loss
        node = _input(node)
    name = _name(node)
    if name == "DivBackward0":
        return _constant(node, "_saved_other", 1)
    if name == "MulBackward0":
        factor = _constant(node, "_saved_other", 1) or _constant(node, "_saved_self", 0)
        return None if not factor else 1.0 / factor
    return None


def is_compiled(loss: torch.Tensor, *, is_scaled: bool = False) -> bool:
    """Return whether the loss comes out of a compiled function, which hides its operations."""
    return _COMPILED in _name(_last_operation(loss, is_scaled))


def _last_operation(loss: torch.Tensor, is_scaled: bool) -> Any:
    """Return the graph's last node, beneath the multiplication of a scaler."""
    node = loss.grad_fn
    return _input(node) if is_scaled and _name(node) == "MulBackward0" else node


def _name(node: Any) -> str:
    return "" if node is None else node.name()


def _input(node: Any) -> Any:
    """Return the node of the one input that has a gradient; None if there are several."""
    inputs = [function for function, _ in node.next_functions if function is not None]
    return inputs[0] if len(inputs) == 1 else None


def _constant(node: Any, saved: str, position: int) -> float | None:
    """Return a saved number, if the operand at this position is a constant on the CPU."""
    if node.next_functions[position][0] is not None:
        return None
    value = getattr(node, saved, None)
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.numel() != 1:
        return None
    return float(value)


class LossGraph:
    """What is read from the graph of a loss, before backward runs through it."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._divisors = [find_divisor(loss, is_scaled=scaled) for scaled in (False, True)]
        self._compiled = [is_compiled(loss, is_scaled=scaled) for scaled in (False, True)]

    def divisor(self, *, is_scaled: bool) -> float | None:
        """Return the constant that the loss was divided by last; None without a division."""
        return self._divisors[is_scaled]

    def compiled(self, *, is_scaled: bool) -> bool:
        """Return whether the loss comes out of a compiled function."""
        return self._compiled[is_scaled]


_lock = threading.RLock()  # a user may be collected at any time
_users: list[weakref.ref[Any]] = []
_running: dict[int, LossGraph] = {}  # by the id of the loss whose backward runs
_autograd: Any = torch.autograd
_engine = _autograd._engine_run_backward


def read_graphs(user: object, on: bool) -> None:
    """Read the graphs of losses for this object until it says otherwise, or is collected."""
    with _lock:
        _users[:] = [other for other in _users if other() not in (None, user)]
        if on:
            _users.append(weakref.ref(user, _leave))
        _autograd._engine_run_backward = _run_backward if _users else _engine


def _leave(reference: object) -> None:
    read_graphs(reference, False)


def running_graph(loss: torch.Tensor) -> LossGraph | None:
    """Return what was read from the graph of a loss whose backward runs."""
    return _running.get(id(loss))


def _run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    loss = outputs[0]
    is_loss = kwargs.get("accumulate_grad") and len(outputs) == 1
    if not is_loss or not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return _engine(outputs, *args, **kwargs)
    _running[id(loss)] = LossGraph(loss)
    try:
        return _engine(outputs, *args, **kwargs)
    finally:
        _running.pop(id(loss), None)
