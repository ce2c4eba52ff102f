"""Calls of gradient scalers, whether `attach` was given the scaler or not.

The methods of `torch.amp.GradScaler` are replaced while somebody listens. A scaler that skips a
step does not call the optimizer, and a fused optimizer skips inside its kernel; PyTorch has no hook
for either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hookline.loop.patches import SharedPatch

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.step_watch import StepWatch

_METHODS = ("scale", "unscale_", "step")
_running: set[tuple[int, str]] = set()  # a subclass may call the method that it overrides


def _targets(watches: Iterable[StepWatch]) -> Iterator[tuple[Any, str]]:
    """Yield the classes that define the methods: torch's own, and those of given scalers."""
    kinds: list[type[Any]] = [torch.amp.GradScaler]
    kinds += [type(watch.scaler) for watch in watches if watch.scaler is not None]
    for kind in kinds:
        for name in _METHODS:
            yield next(base for base in kind.__mro__ if name in vars(base)), name


def _replace(method: Callable[..., Any]) -> Callable[..., Any]:
    name = f"scaler_{method.__name__.rstrip('_')}"

    @functools.wraps(method)
    def watched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = functools.partial(method, self)
        key = id(self), name
        if key in _running or not self.is_enabled():
            return call(*args, **kwargs)
        for watch in scaler_patch:
            call = functools.partial(getattr(watch, name), call, self)
        _running.add(key)
        try:
            return call(*args, **kwargs)
        finally:
            _running.discard(key)

    return watched


scaler_patch: SharedPatch[StepWatch] = SharedPatch(_targets, _replace)
