"""Finds the moment between two steps of an unchanged loop at which its state can be saved.

When `optimizer.step()` returns, the loop's schedulers and its scaler have not been updated yet.
When a part of the model is called again, or the next step begins, they have.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.loop.model_watch import ModelCallback, ModelGroup
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks

__all__ = ["StepBoundary"]


class StepBoundary:
    """Calls back before the next call of the model or of a part of it, once.

    Args:
        model: the model.
        is_called: returns whether the loop calls the model itself. Otherwise its parts are watched.
        reached: the callback.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        is_called: Callable[[], bool],
        reached: Callable[[], None],
    ) -> None:
        self._models = list(model) if isinstance(model, ModelGroup) else [model]
        self._is_called = is_called
        self._reached = reached
        self._handles: list[RemovableHandle] = []  # kept: a new hook would compile a model again
        self._part_handles: list[RemovableHandle] = []
        self._thread: int | None = None  # None while nobody waits

    def watch(self) -> None:
        """Wait for the next call."""
        self._thread = get_ident()
        compiled = all(hasattr(model, "_orig_mod") for model in self._models)
        if not self._handles and (compiled or self._is_called()):
            self._handles = [self._hook(model) for model in self._models]
        if not self._handles and not self._part_handles:
            parts = dict.fromkeys(part for model in self._models for part in model.modules())
            self._part_handles = [self._hook(part) for part in parts]

    def stop(self) -> None:
        """Stop waiting."""
        self._thread = None
        while self._part_handles:
            self._part_handles.pop().remove()

    def detach(self) -> None:
        """Remove all hooks from the model."""
        self.stop()
        while self._handles:
            self._handles.pop().remove()
        for model in self._models:
            for part in model.modules():
                unhide_hooks(part)

    def _hook(self, module: torch.nn.Module) -> RemovableHandle:
        hide_hooks(module)
        # First: FSDP2's own hook gathers the parameters, which are saved before that.
        callback = ModelCallback(self._before_call)
        return module.register_forward_pre_hook(callback, prepend=True)

    def _before_call(self, module: torch.nn.Module, args: Any) -> None:
        if get_ident() == self._thread:
            self.stop()
            self._reached()
