"""Calls of `model.generate`, whose forwards are not training forwards.

PyTorch has no hook for them. The method `generate` of the model's class is therefore replaced while
a session is attached, and restored afterwards; it does what it did, and other models of the class
are not looked at. A method of the object itself would be copied with the model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hookline.integrations.bare_loop.listeners import Listeners
from hookline.loop.model_watch import ModelGroup

__all__ = ["GenerationWatch"]

_originals: dict[Any, Callable[..., Any]] = {}  # by the class that defines the method


class GenerationWatch:
    """Calls back with True before the model generates, and with False after it.

    A model inside of wrappers (DDP, `torch.compile`, adapters) is watched, too, as are wrappers
    with a `generate` of their own. A part of the model with such a method is not: what it does
    belongs to the model's forward.

    Args:
        model: the model, or several.
        set_generating: the callback.
    """

    def __init__(self, model: torch.nn.Module, set_generating: Callable[[bool], None]) -> None:
        self._set_generating = set_generating
        self._depth = 0
        models = list(model) if isinstance(model, ModelGroup) else [model]
        self._modules = {id(part): part for each in models for part in _generating_modules(each)}
        classes = (_defining_class(type(part)) for part in self._modules.values())
        self.classes: set[Any] = {kind for kind in classes if kind is not None}

    def start(self) -> None:
        """Watch calls of `generate`; nothing happens for a model without it."""
        if self._modules:
            _watches.add(self)

    def stop(self) -> None:
        """Stop watching; the last one restores the methods."""
        _watches.remove(self)

    def watches(self, module: Any) -> bool:
        """Return whether this is the model, or what it wraps."""
        return id(module) in self._modules

    def enter(self) -> None:
        """Note that a call of `generate` begins."""
        self._depth += 1
        self._set_generating(True)

    def leave(self) -> None:
        """Note that a call of `generate` has ended, or failed."""
        self._depth -= 1
        self._set_generating(self._depth > 0)


def _generating_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model and the models that it only wraps, where they can generate."""
    whole = {id(parameter) for parameter in model.parameters()}
    return [
        part
        for part in model.modules()
        if _defining_class(type(part)) is not None
        and (part is model or {id(parameter) for parameter in part.parameters()} == whole)
    ]


def _defining_class(kind: type) -> type | None:
    """Return the class whose method `generate` is; None without a plain method."""
    defining = next((each for each in kind.__mro__ if "generate" in vars(each)), None)
    method = None if defining is None else vars(defining)["generate"]
    return defining if inspect.isfunction(method) else None


def _replacement(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def watched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = [watch for watch in _watches if watch.watches(self)]
        for watch in found:
            watch.enter()
        try:
            return generate(self, *args, **kwargs)
        finally:
            for watch in found:
                watch.leave()

    return watched


def _change_methods() -> None:
    """Replace the methods of classes that somebody watches, and put the others back."""
    used = {kind for watch in _watches for kind in watch.classes}
    for kind in used - _originals.keys():
        _originals[kind] = vars(kind)["generate"]
        kind.generate = _replacement(vars(kind)["generate"])
    for kind in _originals.keys() - used:
        original = _originals.pop(kind)
        if getattr(vars(kind).get("generate"), "__wrapped__", None) is original:
            kind.generate = original


_watches: Listeners[GenerationWatch] = Listeners(_change_methods)
