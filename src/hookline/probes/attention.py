"""Attention modules: their heads, their output projections, and the functions that they call."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.hooks import RemovableHandle

from hookline.errors import ProbeError

_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
_PROJECTIONS = (
    *("c_proj", "o_proj", "out_proj", "out_lin", "dense"),
    *("o", "wo", "proj", "output.dense"),
)
"""Of the attention classes of torch and transformers: GPT-2, Llama, OPT, DistilBERT, NeoX, T5 …"""

_MULTI_HEAD: Any = torch.nn.functional.multi_head_attention_forward


def count_heads(module: nn.Module) -> int | None:
    """Return the number of heads from an attribute of a module, its `config` or its `self`."""
    # BERT's classes have a module `self` for the heads, beside `output` with the projection.
    for owner in (module, getattr(module, "config", None), getattr(module, "self", None)):
        for name in _HEADS:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and heads > 0:
                return heads
    return None


def find_projection(name: str, module: nn.Module) -> tuple[nn.Module, int]:
    """Return the layer whose input is the outputs of all heads side by side, and their number."""
    modules: dict[str, nn.Module] = dict(module.named_modules())
    found = next((modules[path] for path in _PROJECTIONS if path in modules), None)
    heads = count_heads(module)
    if found is None or heads is None:
        missing = "number of heads" if heads is None else "output projection"
        raise ProbeError(
            f"'{name}' is a {type(module).__name__}, whose {missing} is not known. `head` is for "
            "the attention classes of torch and transformers. Edit the input of the projection "
            "itself: Edit(…, where='input', at=(..., slice(start, end)))."
        )
    return found, heads


def _without_dispatch(function: Any) -> Any:
    """Return a function of torch that does not hand its call to a `TorchFunctionMode` first."""
    variables = {**function.__globals__, "has_torch_function": lambda _: False}
    copied = FunctionType(function.__code__, variables, argdefs=function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_PLAIN_MULTI_HEAD = _without_dispatch(_MULTI_HEAD)
"""Within it, softmax, fused attention and the output projection are seen."""


class FunctionWatch(TorchFunctionMode):
    """Sees the functions of torch that are called within one call of a module."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: RemovableHandle | None = None

    def see(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function, or something else in its place."""
        return func(*args, **kwargs)

    def start(self, module: nn.Module) -> None:
        """Watch a module's call that begins, until it ends or raises, or until `stop`."""
        # A hook of its own, since the probe may be disabled within the call. If the module
        # raises, only the last hook may be removed while PyTorch calls them: this one.
        self._handle = module.register_forward_hook(lambda *_: self.stop(), always_call=True)
        _push_mode(self)

    def stop(self) -> None:
        """Watch no longer."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self in _get_current_function_mode_stack():
            later: list[Any] = []  # watches of other probes, which began after this one
            while (mode := _pop_mode()) is not self:
                later.append(mode)
            for mode in reversed(later):
                _push_mode(mode)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is _MULTI_HEAD:
            with self:
                return _PLAIN_MULTI_HEAD(*args, **kwargs)
        return self.see(func, args, kwargs)
