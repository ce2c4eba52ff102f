"""Watches a GradScaler: when gradients are unscaled, and when a step is skipped.

A scaler that skips a step does not call the optimizer, and a fused optimizer skips inside its
kernel; PyTorch has no hook for either. `step` and `unscale_` of this scaler object are therefore
replaced while a session is attached, and restored afterwards. Gradients are unscaled before the
optimizer is called, fused or not, so that hooks see those it uses; the result is the same, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch

from hookline.integrations.hosts.wrapped_methods import WrappedMethods

__all__ = ["ScalerWatch"]


class Listener(Protocol):
    """What is called when the scaler does something."""

    def watches(self, optimizer: torch.optim.Optimizer) -> bool: ...
    def unscaled(self, optimizer: torch.optim.Optimizer) -> None: ...
    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None: ...
    def scaler_stepped(self, optimizer: torch.optim.Optimizer) -> None: ...


class ScalerWatch:
    """Watches one scaler for all sessions that are attached to it."""

    _all: ClassVar[WeakKeyDictionary[torch.amp.GradScaler, ScalerWatch]] = WeakKeyDictionary()

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self.listeners: list[Listener] = []
        self._unscaled: set[int] = set()
        self._wrapped = WrappedMethods()  # which are not in copies and pickles of the scaler
        self._wrapped.wrap(scaler, "step", self._step)
        self._wrapped.wrap(scaler, "unscale_", self._unscale)

    @classmethod
    def listen(cls, scaler: torch.amp.GradScaler, listener: Listener) -> None:
        """Add a listener to the scaler's watch."""
        if scaler not in cls._all:
            cls._all[scaler] = cls(scaler)
        cls._all[scaler].listeners.append(listener)

    @classmethod
    def leave(cls, scaler: torch.amp.GradScaler | None, listener: Listener) -> None:
        """Remove a listener; the last one restores the scaler."""
        watch = cls._all.get(scaler) if scaler is not None else None
        if scaler is None or watch is None or listener not in watch.listeners:
            return
        watch.listeners.remove(listener)
        if not watch.listeners:
            del cls._all[scaler]
            watch.restore()

    def restore(self) -> None:
        """Put the scaler's own methods back."""
        self._wrapped.restore()

    def _listening(self, optimizer: torch.optim.Optimizer) -> list[Listener]:
        return [listener for listener in self.listeners if listener.watches(optimizer)]

    def _unscale(self, unscale: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
        """Unscale as the scaler does, then call the listeners."""
        unscale(optimizer)
        self._unscaled.add(id(optimizer))
        for listener in self._listening(optimizer):
            listener.unscaled(optimizer)

    def _step(
        self, step: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Step as the scaler does, with gradients unscaled before the optimizer is called."""
        listeners = self._listening(optimizer)
        if not self._scaler.is_enabled() or not listeners:
            return step(optimizer, *args, **kwargs)
        if id(optimizer) not in self._unscaled:
            self._scaler.unscale_(optimizer)
        for listener in listeners:
            listener.scaler_steps(optimizer)
        result = step(optimizer, *args, **kwargs)
        self._unscaled.discard(id(optimizer))
        for listener in listeners:
            listener.scaler_stepped(optimizer)
        return result
