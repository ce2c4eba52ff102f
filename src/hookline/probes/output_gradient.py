"""The gradient of one tensor that a module returned, told when it comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

__all__ = ["on_gradient"]


def on_gradient(tensor: Tensor, tell: Callable[[Tensor], None]) -> None:
    """Have the gradient of a tensor told, in each backward that comes to it.

    Of a tensor that nothing was computed for, such as a parameter, it never is: a hook would stay
    there for good, and the gradient be that of all its uses. The graph alone holds what this puts
    there, and it goes with the graph.
    """
    if tensor.grad_fn is None:
        return
    base = tensor._base
    if base is None or not _is_part(tensor, base):
        tensor.register_hook(partial(_came, tell))
        return
    view = _View(tensor, base, tell)
    tensor.register_hook(view.came)
    base.register_hook(view.base_came)


def _came(tell: Callable[[Tensor], None], gradient: Tensor | None) -> None:
    """Tell it; None comes for what was not used, of what one operation returned beside others."""
    if gradient is not None:
        tell(gradient)


def _is_part(view: Tensor, base: Tensor) -> bool:
    """Whether the elements of a view are some of its base's, as they are.

    Not within `torch.func`, whose tensors cannot be looked behind.
    """
    plain = type(base) is Tensor and base.layout is torch.strided and not base.is_complex()
    return (
        plain
        and peek_interpreter_stack() is None
        and base.grad_fn is not None
        and base.dtype == view.dtype
        and base.numel() >= view.numel()
    )


def _is_of_linear(view: Tensor, base: Tensor) -> bool:
    """Whether a linear layer made the view, of a base that nobody else has."""
    made_by, base_by = view.grad_fn, base.grad_fn
    return (
        made_by is not None
        and base_by is not None
        and made_by.next_functions[0][0] is base_by
        and base_by.name() == "AddmmBackward0"
    )


class _View:
    """The gradient of a view, as a linear layer with a sequence returns it.

    When it is changed in place, its graph is made anew, from its base on, and nothing comes by here
    any more. What was there before is in the gradient of the base then. That has the part of uses
    before the change, too; but others may have used the base as well. Where it is known that only
    the view could be used, it is taken whole.
    """

    def __init__(self, view: Tensor, base: Tensor, tell: Callable[[Tensor], None]) -> None:
        self._tell = tell
        self._base = (base.size(), base.stride())
        start = view.storage_offset() - base.storage_offset()
        self._place = (view.size(), view.stride(), start)
        # Shares the count of changes, and has none of the memory.
        self._changes = view.detach()
        self._changes.data = view.new_empty(0)
        self._version = self._changes._version
        self._own = _is_of_linear(view, base)
        self._task = -1

    @property
    def _changed(self) -> bool:
        return self._changes._version != self._version

    def came(self, gradient: Tensor | None) -> None:
        """The view's own gradient is there. It comes before that of the base."""
        if gradient is not None and not (self._own and self._changed):
            self._task = torch._C._current_graph_task_id()
            self._tell(gradient)

    def base_came(self, gradient: Tensor | None) -> None:
        """That of the base is there."""
        came = self._task == torch._C._current_graph_task_id()
        if gradient is not None and not came and self._changed:
            laid_out = gradient.new_empty_strided(*self._base).copy_(gradient)
            self._tell(laid_out.as_strided(*self._place))
