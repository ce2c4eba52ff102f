"""Calls of `model.generate`, whose forwards are not training forwards.

PyTorch has no hook for them. The method `generate` of the model's class is therefore replaced while
a session is attached; it does what it did, and other models of the class are not looked at. A
method of the object itself would be copied with the model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hookline.loop.event_context import EventContext
from hookline.loop.model_watch import models_in
from hookline.loop.patches import SharedPatch


class GenerationWatch:
    """Sets `generating` in the event context while the model generates.

    A model inside of wrappers (DDP, `torch.compile`, adapters) is watched, too, as are wrappers
    with a `generate` of their own. A part of the model with such a method is not: what it does
    belongs to the model's forward.

    Args:
        context: has the model, or several.
    """

    def __init__(self, context: EventContext) -> None:
        self._context = context
        self._depth = 0
        models = models_in(context.model)
        self.modules = {id(part): part for each in models for part in _generating_modules(each)}
        classes = (_defining_class(type(part)) for part in self.modules.values())
        self.classes: set[Any] = {kind for kind in classes if kind is not None}

    def start(self) -> None:
        """Watch calls of `generate`; nothing happens for a model without it."""
        if self.modules:
            _patch.add(self)

    def stop(self) -> None:
        """Stop watching; the last one restores the methods."""
        _patch.remove(self)

    def add_calls(self, count: int) -> None:
        """Note that a call of `generate` begins (1), or has ended or failed (-1)."""
        self._depth += count
        self._context.generating = self._depth > 0


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


def _classes(watches: Iterable[GenerationWatch]) -> list[tuple[Any, str]]:
    return [(kind, "generate") for watch in watches for kind in watch.classes]


def _replace(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def watched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = [watch for watch in _patch if id(self) in watch.modules]
        for watch in found:
            watch.add_calls(1)
        try:
            return generate(self, *args, **kwargs)
        finally:
            for watch in found:
                watch.add_calls(-1)

    return watched


_patch: SharedPatch[GenerationWatch] = SharedPatch(_classes, _replace)
