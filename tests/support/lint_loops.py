"""Small bare loops with `Lint`, shared by the tests of its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline
from hookline.hooks.lint.finding import Finding


class Layers(nn.Module):
    """Three layers with names, and a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


def layers(seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    return Layers()


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 8, generator=generator)
    return x.to(dtype), torch.randn(6, 4, generator=generator).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    return F.mse_loss(model(x), y)


def lint(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 8,
    step_fn: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Return the findings of a bare loop; `step_fn(step)` replaces the plain step."""

    def plain_step(step: int) -> None:
        for each in optimizers:
            each.zero_grad()
        loss_of(model, step).backward()
        for each in optimizers:
            each.step()

    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    hook = hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(steps):
            (step_fn or plain_step)(step)
    assert_none_failed(hook)
    return hook.findings


def ids(findings: list[Finding]) -> list[str]:
    """Return the ids of the checks that have found something."""
    return [finding.check for finding in findings]


def assert_none_failed(hook: hookline.Lint) -> None:
    failed = {name: why for name, why in hook.left_out.items() if "failed" in why}
    assert not failed, failed


def lint_steps(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    steps: int = 4,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[int], Any] | None = None,
    only: Iterable[str] | None = None,
) -> dict[str, Finding]:
    """Train a model, call `after` each step, and return the findings by their checks."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    hook = hookline.Lint(only=None if only is None else list(only))
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(step).backward()
            optimizer.step()
            if after is not None:
                after(step)
    assert_none_failed(hook)
    return {finding.check: finding for finding in hook.findings}
