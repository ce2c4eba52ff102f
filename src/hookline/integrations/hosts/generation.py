"""Calls of `model.generate`, whose forwards are not training forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["watch_generation"]


def watch_generation(
    model: torch.nn.Module, set_generating: Callable[[bool], None]
) -> Callable[[], None]:
    """Call back with True before the model generates and with False after it.

    The method is replaced on this object only. Forwards of a `generate` run under `no_grad`, so
    events of the model's calls leave them alone in any case; probes need to be told.

    Returns:
        A function that puts the method back.
    """
    generate = getattr(model, "generate", None)
    if not callable(generate) or "generate" in vars(model):
        return _nothing
    depth = 0

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        set_generating(True)
        try:
            return generate(*args, **kwargs)
        finally:
            depth -= 1
            set_generating(depth > 0)

    vars(model)["generate"] = watched

    def restore() -> None:
        if vars(model).get("generate") is watched:
            del vars(model)["generate"]

    return restore


def _nothing() -> None:
    """Do nothing."""
