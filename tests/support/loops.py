"""Small real models, loops and trainers, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rank_checks import run_ranks
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import Trainer, TrainerConfig
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


def config(**fields: Any) -> TrainerConfig:
    """Return a configuration without run folder and display, unless the fields ask for them."""
    return TrainerConfig(**{"runs": None, "progress": "off", **fields})


def make_trainer(
    *hooks: hookline.Hook,
    model: nn.Module | None = None,
    optimizers: Any = None,
    forward: Iterable[Callable[..., Any]] = (),
    updates: Iterable[Callable[..., Any]] = (),
    **options: Any,
) -> Trainer:
    """Return a trainer with these hooks, and with functions as forward hooks and updates.

    Args:
        hooks: the hooks.
        model: the model; by default a small one, always with the same weights.
        optimizers: the optimizers; by default SGD for all parameters.
        forward: functions to register as forward hooks.
        updates: functions to register as updates.
        options: the fields of `TrainerConfig`, and the other arguments of `Trainer`.
    """
    own_model, own_optimizer = make()
    if model is not None and optimizers is None:
        own_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ("schedulers", "loss_fn", "step_fn", "tokens_fn")
    arguments = {name: options.pop(name) for name in names if name in options}
    trainer = Trainer(
        config(**options),
        own_model if model is None else model,
        own_optimizer if optimizers is None else optimizers,
        hooks=hooks,
        **arguments,
    )
    for kind, functions in (("forward", forward), ("update", updates)):
        for function in functions:
            trainer.add_hook(function, kind=kind)
    return trainer


def fit(
    *hooks: hookline.Hook,
    data: Any = None,
    val: Any = None,
    resume_from: Any = None,
    **options: Any,
) -> Trainer:
    """Train with these hooks, on four batches by default; the options are those of make_trainer."""
    trainer = make_trainer(*hooks, **options)
    return trainer.fit(batches(4) if data is None else data, val, resume_from=resume_from)


def fire_steps(manager: hookline.HookManager, steps: Iterable[int]) -> None:
    """Fire on_step_end for each step."""
    for step in steps:
        manager.fire("on_step_end", step=step)


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


def told_in(hook: Any, event: str) -> list[dict[str, Any]]:
    """The arguments that a recorder got in each call of an event."""
    return [told[1] for told in hook.told if not isinstance(told, str) and told[0] == event]


def hooks_on(model: nn.Module) -> int:
    """The number of forward hooks on a model's modules."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def snapshot(thing: Any) -> dict[str, Any]:
    """Return what stands in an object and its parts, to compare before and after."""
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
    return run_ranks(path)
