"""Notice calls of torch's gradient clipping functions.

`clip_grad_norm_`, `clip_grad_value_`, `get_total_norm` and `clip_grads_with_norm_` are wrappers
that call the function in their closure cell. Replacing that function reaches every caller: through
the module, imported by name before, and inside Accelerate, Hugging Face and Lightning. The cells
are changed while at least one listener is there, and restored when the last one leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.utils import clip_grad

from hookline.errors import LoopError
from hookline.integrations.bare_loop.listeners import Listeners

__all__ = ["ClipCall", "ClipListener", "add_clip_listener", "remove_clip_listener"]

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")


_COMPILED = (
    "{} is called inside a function that torch.compile compiles, where hooks cannot run between "
    "backward and clipping. Call it outside the compiled function."
)


@dataclass(slots=True)
class ClipCall:
    """One call of a clipping function by the loop.

    Attributes:
        function: the function's public name.
        tensors: the parameters that it was given; for `get_total_norm` the gradients. A listener
            that replaces gradients in `before_clip` puts the new ones here.
        norm_type: the order of the norm; None where there is none.
        result: what the function returned: the norm before clipping, or None.
    """

    function: str
    tensors: list[torch.Tensor]
    norm_type: float | None
    result: torch.Tensor | None = None


class ClipListener(Protocol):
    """What is told of each call; both methods run on the thread of the caller."""

    def before_clip(self, call: ClipCall) -> None:
        """Handle a call before gradients are read or changed."""
        ...

    def after_clip(self, call: ClipCall) -> None:
        """Handle a call that has returned; it is not called after an exception."""
        ...


_originals: dict[str, Callable[..., Any]] = {}  # by function, while the cells are changed
_thread = threading.local()


def add_clip_listener(listener: ClipListener) -> None:
    """Call this listener around every clipping call, until it is removed or collected."""
    _listeners.add(listener)


def remove_clip_listener(listener: ClipListener) -> None:
    """Stop calling a listener; with the last one, torch's functions are as they were."""
    _listeners.remove(listener)


def _change_functions() -> None:
    if _listeners and not _originals:
        _replace_functions()
    elif not _listeners:
        _restore_functions()


_listeners: Listeners[ClipListener] = Listeners(_change_functions)


def _replace_functions() -> None:
    cells = {name: _cell_of(name) for name in _FUNCTIONS}  # all of them, or none is changed
    for name, cell in cells.items():
        _originals[name] = cell.cell_contents
        cell.cell_contents = _watched(name, cell.cell_contents)


def _restore_functions() -> None:
    for name, original in _originals.items():
        _cell_of(name).cell_contents = original
    _originals.clear()


def _cell_of(name: str) -> CellType:
    """Return the closure cell that holds the function which a clipping function calls."""
    function = getattr(clip_grad, name, None)
    if isinstance(function, FunctionType) and "func" in function.__code__.co_freevars:
        cells = function.__closure__ or ()
        return cells[function.__code__.co_freevars.index("func")]
    raise LoopError(
        f"torch {torch.__version__} defines torch.nn.utils.clip_grad.{name} in a way that "
        "Hookline does not know, so it would not notice gradient clipping. Use another "
        "version of torch, or a newer version of Hookline."
    )


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    public = name.lstrip("_")
    first = original.__code__.co_varnames[0]  # "parameters" or "tensors"
    has_norm_type = "norm_type" in original.__code__.co_varnames

    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise LoopError(_COMPILED.format(public))
        if get_eval_frame_callback() is None:
            return notify(*args, **kwargs)
        # A caller that is compiled in parts runs this eagerly, hooks included.
        return torch.compiler.disable(notify)(*args, **kwargs)

    def notify(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "inside", False):  # clip_grad_norm_ calls the two others
            return original(*args, **kwargs)
        given = args[0] if args else kwargs.get(first, ())
        tensors = _as_list(given)
        if not tensors:  # nothing to clip, or arguments that torch rejects
            return original(*args, **kwargs)
        norm_type = _norm_type(name, args, kwargs) if has_norm_type else None
        call = ClipCall(public, tensors, norm_type)
        _thread.inside = True
        try:
            listeners = list(_listeners)
            for listener in listeners:
                listener.before_clip(call)
            rest = {key: value for key, value in kwargs.items() if key != first}
            call.result = original(call.tensors, *args[1:], **rest)
            for listener in listeners:
                listener.after_clip(call)
        finally:
            _thread.inside = False
        return call.result

    return watched


def _as_list(given: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _norm_type(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    index = 1 if name == "_get_total_norm" else 2
    return float(args[index] if len(args) > index else kwargs.get("norm_type", 2.0))
