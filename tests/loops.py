"""Small real models and loops, shared by the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.events import EVENTS


class Net(nn.Module):
    """Two layers with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(x))))


def make(seed: int = 0, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def batches(n: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator))
        for _ in range(n)
    ]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Any],
    before_step: Callable[[], Any] = lambda: None,
) -> list[float]:
    """An ordinary loop; returns its losses."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses


def recorder(*events: str, **asks: tuple[str, ...]) -> hookline.Hook:
    """A hook that records the events it is told, with the arguments that `asks` names for each."""
    told: list[Any] = []

    def method(event: str) -> Callable[..., None]:
        def record(self: Any, **kwargs: Any) -> None:
            told.append((event, kwargs) if kwargs else event)

        names = ", ".join(("self", *asks.get(event, ())))
        given = ", ".join(f"{name}={name}" for name in asks.get(event, ()))
        scope: dict[str, Any] = {"record": record}
        exec(f"def {event}({names}): record(self, {given})", scope)
        return scope[event]

    names = [*events, *(event for event in asks if event not in events)]
    hook = type("Recorder", (hookline.Hook,), {name: method(name) for name in names})()
    hook.told = told
    return hook


ALL_EVENTS = tuple(EVENTS)


def snapshot(thing: Any) -> dict[str, Any]:
    """What stands in an object and its parts, to compare before and after."""
    if isinstance(thing, nn.Module):
        return {
            name: {key: _frozen(value) for key, value in vars(module).items()}
            for name, module in thing.named_modules()
        }
    return {key: _frozen(value) for key, value in vars(thing).items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    return id(value) if not isinstance(value, int | float | bool | str) else value


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_on_two_ranks(script: str, folder: Path) -> str:
    """Run a script under torchrun; return what both ranks printed."""
    path = folder / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *("--standalone", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
