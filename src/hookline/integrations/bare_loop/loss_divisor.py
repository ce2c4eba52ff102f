"""By which constant a loop has divided its loss before backward.

Under gradient accumulation most loops call `(loss / n).backward()`. The division is the last
operation of the loss's graph, with its constant saved there. Autograd frees it as soon as it has
passed that operation, before it reaches the model: it must be read before backward.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LossGraph", "find_divisor", "is_compiled"]

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
