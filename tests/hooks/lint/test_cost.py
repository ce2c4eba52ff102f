"""A step that Lint does not look at closely costs little, however large the model is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline

PACKAGE = Path(hookline.__file__).parent
FOLDERS = tuple(f"{PACKAGE / name}/" for name in ("hooks", "integrations", "loop", "tensors"))
MOST_CALLS = 75  # of Python functions of Hookline, the session's included, in a step


class Calls:
    """Counts what Hookline calls: functions of its own, and all, with those written in C.

    The dispatch of events is left out: it measures its time now and then.
    """

    def __init__(self) -> None:
        self.own = self.every = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event in ("call", "c_call") and name.startswith(FOLDERS):
            self.own += event == "call"
            self.every += 1


class Loop:
    """A loop with Lint over a model of some layers."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(layers)
        ]
        self.model = nn.Sequential(*blocks, nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session = hookline.attach(self.model, self.optimizer, hooks=[hookline.Lint()])
        self.data = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(8)]
        self.steps = 0

    def step(self) -> Tensor:
        x, y = self.data[self.steps % len(self.data)]
        self.steps += 1
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def calls_in_steps(self, first: int, last: int) -> tuple[int, int]:
        """Return the numbers of calls in the cheapest of these steps."""
        while self.steps < first - 1:
            self.step()
        counted = []
        while self.steps < last:
            with Calls() as calls:
                self.step()
            counted.append((calls.own, calls.every))
        self.session.detach()
        return min(counted)


def test_a_step_that_is_not_due_calls_few_functions() -> None:
    own, _ = Loop(layers=1).calls_in_steps(66, 80)
    assert 0 < own <= MOST_CALLS


def test_a_step_that_is_not_due_costs_the_same_for_a_large_model() -> None:
    assert Loop(layers=1).calls_in_steps(66, 80) == Loop(layers=12).calls_in_steps(66, 80)


def test_layers_have_hooks_in_due_steps_only() -> None:
    loop = Loop(layers=3)
    layers = [module for module in loop.model.modules() if module is not loop.model]
    hooked = []
    for _ in range(17):
        hooked.append(any(layer._forward_hooks for layer in layers))
        loop.step()
    # The first call of the model starts training: its layers are hooked within the first step.
    loop.session.detach()
    assert hooked[1:] == [*[True] * 9, *[False] * 5, True, False]
