"""Calls of torch's gradient clipping functions.

`clip_grad_norm_`, `clip_grad_value_`, `get_total_norm` and `clip_grads_with_norm_` are wrappers
that call the function in their closure cell. Replacing that function reaches every caller: through
the module, imported by name before, and inside Accelerate, Hugging Face and Lightning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as active_dynamo
from torch.nn.utils import clip_grad

from hookline.errors import LoopError
from hookline.loop.patches import SharedPatch

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")
_thread = threading.local()


@dataclass(slots=True)
class ClipCall:
    """One call of a clipping function by the loop.

    Attributes:
        function: the function's public name.
        tensors: the parameters that it gets; for `get_total_norm` the gradients. A listener
            that replaces gradients in `before_clip` puts the new ones here.
        norm_type: the order of the norm; None where there is none.
        max_norm: the norm to which gradients are clipped; None where there is none.
        result: what the function returned: the norm before clipping, or None.
    """

    function: str
    tensors: list[torch.Tensor]
    norm_type: float | None
    max_norm: float | None = None
    result: torch.Tensor | None = None

    def has_norm_of(self, gradients: list[torch.Tensor]) -> bool:
        """Return whether the call returns the 2-norm of exactly these gradients."""
        clipped = {id(tensor.grad) for tensor in self.tensors if tensor.grad is not None}
        is_norm = self.function == "clip_grad_norm_" and self.norm_type == 2.0
        return is_norm and clipped == set(map(id, gradients))


class ClipListener(Protocol):
    """Is called before and after each call of a clipping function."""

    def before_clip(self, call: ClipCall) -> None:
        """Gradients are about to be clipped."""

    def after_clip(self, call: ClipCall) -> None:
        """Gradients were clipped."""


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


def _replace(original: Callable[..., Any]) -> Callable[..., Any]:
    public = original.__name__.lstrip("_")
    names = original.__code__.co_varnames
    first = names[0]  # "parameters" or "tensors"
    place = names.index("norm_type") if "norm_type" in names else None
    clips_norm = len(names) > 1 and names[1] == "max_norm"

    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise LoopError(
                f"{public} is called inside a function that torch.compile compiles, where hooks "
                "cannot run between backward and clipping. Call it outside the compiled function."
            )
        if active_dynamo() is None:
            return notify(*args, **kwargs)
        # A caller that is compiled in parts runs this eagerly, hooks included.
        return torch.compiler.disable(notify)(*args, **kwargs)

    def notify(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "inside", False):  # clip_grad_norm_ calls the two others
            return original(*args, **kwargs)
        clipped = args[0] if args else kwargs.get(first, ())
        tensors = [clipped] if isinstance(clipped, torch.Tensor) else list(clipped)
        if not tensors:  # nothing to clip, or arguments that torch rejects
            return original(*args, **kwargs)
        norm_type = None
        if place is not None:
            norm_type = float(args[place] if len(args) > place else kwargs.get("norm_type", 2.0))
        max_norm = (args[1] if len(args) > 1 else kwargs.get("max_norm")) if clips_norm else None
        call = ClipCall(public, tensors, norm_type, max_norm)
        _thread.inside = True
        try:
            listeners = list(clip_patch)
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


clip_patch: SharedPatch[ClipListener] = SharedPatch(
    lambda listeners: [(_cell_of(name), "cell_contents") for name in _FUNCTIONS], _replace
)
