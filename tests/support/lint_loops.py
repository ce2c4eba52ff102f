"""Bare loops with `Lint`, and what it finds in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import hookline


def lint_steps(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    steps: int = 4,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[int], Any] | None = None,
    only: Iterable[str] | None = None,
) -> dict[str, hookline.hooks.lint.finding.Finding]:
    """Train a model, call `after` each step, and return the findings by their checks."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    lint = hookline.Lint(only=None if only is None else list(only))
    with hookline.attach(model, optimizer, hooks=[lint]):
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(step).backward()
            optimizer.step()
            if after is not None:
                after(step)
    assert not lint.left_out, lint.left_out
    return {finding.check: finding for finding in lint.findings}
