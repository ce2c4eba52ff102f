"""Each diagnostic only observes: also when it is toggled in mid-run, and when it fails."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from test_diagnostics import all_of_them
from torch import Tensor, nn

import hookline

NAMES = [type(hook).__name__ for hook in all_of_them()]


class Net(nn.Module):
    """Attention, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(5)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.norm(x)))


class Toggle(hookline.Hook):
    """Turns a hook off and on again, within steps and between them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_after_forward(self, step: int, trainer: Any) -> None:
        if step == 1:
            trainer.disable_hook(self.name)

    def on_before_backward(self, step: int, trainer: Any) -> None:
        if step == 2:
            trainer.enable_hook(self.name)

    def on_before_optimizer_step(self, step: int, trainer: Any) -> None:
        if step == 3:
            trainer.disable_hook(self.name)

    def on_step_end(self, step: int, trainer: Any) -> None:
        if step == 4:
            trainer.enable_hook(self.name)


def train(*hooks: hookline.Hook, precision: str = "bf16") -> dict[str, Any]:
    """Train for six steps; return everything that a hook could have changed."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = hookline.TrainerConfig(
        runs=None, progress="off", accumulate=2, precision=precision, seed=1, clip_norm=0.5
    )
    trainer = hookline.Trainer(config, model, optimizer, hooks=hooks)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(12, 3, 5, 8, generator=generator)
    targets = torch.randint(0, 3, (12, 3, 5), generator=generator)
    trainer.fit(list(zip(inputs, targets, strict=True)))
    assert trainer.status == "completed"
    assert not torch.overrides._get_current_function_mode_stack()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    state = optimizer.state_dict()["state"]
    moments = {f"{n}/{k}": v for n, one in state.items() for k, v in one.items()}
    return {
        **model.state_dict(),
        **moments,
        "random": torch.get_rng_state(),
        "failures": trainer.hooks.summary().failures,
    }


@pytest.fixture(scope="module")
def unobserved() -> dict[str, Any]:
    return train()


def assert_unchanged(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name


def make(name: str) -> hookline.Hook:
    return next(hook for hook in all_of_them() if type(hook).__name__ == name)


@pytest.mark.soak(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_same_with_a_hook_that_is_toggled(name, unobserved) -> None:
    hook = make(name)
    own_name = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
    found = train(hook, Toggle(own_name))
    assert found["failures"] == {}
    assert_unchanged(found, unobserved)


def failing(method: Any) -> Any:
    """Return a method that works twice, and then fails when it is done."""
    calls = 0

    @functools.wraps(method)
    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = method(*args, **kwargs)
        if calls > 2:
            raise ValueError("a failure in the middle")
        return result

    return fail


def methods_of(name: str) -> list[str]:
    kind = getattr(hookline, name)
    return [
        method
        for method in dir(kind)
        if (method.startswith("on_") or method in ("before", "after"))
        and inspect.getmodule(getattr(kind, method)).__name__.startswith("hookline.hooks")
        and method not in ("on_train_start", "on_train_end")
    ]


@pytest.mark.soak(every=4)
@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name in NAMES for method in methods_of(name)]
)
def test_weights_are_the_same_with_a_hook_that_fails(name, method, unobserved, monkeypatch) -> None:
    kind = getattr(hookline, name)
    monkeypatch.setattr(kind, method, failing(getattr(kind, method)))
    found = train(make(name))
    if method != "on_step_skipped":
        assert sum(found["failures"].values()) >= 1
    assert_unchanged(found, unobserved)
