"""Optimizers whose `step` calls that of their base class.

PyTorch calls an optimizer's hooks for both, as soon as an optimizer of the base class was made in
the same process. For a loop, this is one step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from hookline.loop.model_watch import keep_out_of_graphs

__all__ = ["for_outer_steps"]

_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__


def for_outer_steps(
    optimizer: torch.optim.Optimizer, hook: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the step hook without its calls within a step of the same optimizer."""
    bases = (each for each in type(optimizer).__mro__ if each is not torch.optim.Optimizer)
    if sum("step" in vars(base) for base in bases) < 2:
        return hook

    def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if _is_nested(optimizer) else hook(optimizer, args, kwargs)

    keep_out_of_graphs(call)
    return call


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether two steps of this optimizer are on the stack.

    A count that a step adds to would be wrong after a step that has raised.
    """
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps == 2
