"""Probes on one module are called, and edits act, in the order of `list_hooks()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from every_loop import LOOPS, Head
from torch import nn

import hookline
from hookline.probes import Capture, Edit, Probes
from hookline.probes.call import Call
from hookline.probes.probe import Probe
from hookline.probes.taps import tap


def add(value: float, modules: Any = "first", **options: Any) -> Edit:
    return Edit.add(modules, value, enable_intervention=True, **options)


def scale(factor: float, modules: Any = "first", **options: Any) -> Edit:
    return Edit.scale(modules, factor, enable_intervention=True, **options)


# -- in every loop --------------------------------------------------------------------------------


class HeadInputs(Probe):
    """Keeps the values that the body has given to the head in each step."""

    def __init__(self) -> None:
        super().__init__(Head)
        self.values: dict[int | None, set[float]] = {}

    def after(self, call: Call) -> None:
        self.values[call.step] = set(call.args[0].detach().flatten().tolist())


class AddsBefore(hookline.Hook):
    """Adds an edit before another one during training."""

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 2:
            trainer.add_hook(add(1, nn.Sequential), "one", before="zero")


class Toggles(hookline.Hook):
    """Disables the first of two edits and enables it again."""

    def on_train_start(self, trainer: Any) -> None:
        trainer.add_hook(add(1, nn.Sequential), "one", before="zero")

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 1:
            trainer.disable_hook("one")
        if step == 3:
            trainer.enable_hook("one")


class Replaces(Toggles):
    """Replaces the first of two edits by another one."""

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 2:
            trainer.add_hook(add(7, nn.Sequential), "one", replace=True)


@pytest.mark.parametrize("changes", [AddsBefore, Toggles, Replaces])
@pytest.mark.parametrize("loop", LOOPS)
def test_edits_act_in_the_order_of_the_hooks_in_every_loop(
    tmp_path: Path, loop: str, changes: type[hookline.Hook]
) -> None:
    seen, zero = HeadInputs(), scale(0, nn.Sequential)
    zero.hookline_name = "zero"
    _, session = LOOPS[loop]([seen, zero, changes()], tmp_path)
    names = session.hooks.list_hooks()
    assert names.index("one") < names.index("zero")
    assert seen.values[5] == {0.0}  # plus one, times zero


# -- in eager and compiled models -----------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.outer = nn.Sequential(nn.Identity())
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tap(self.outer(self.first(x * self.weight)), "end")


class Loop:
    """A bare loop on a model that returns its input."""

    def __init__(self, compiled: bool) -> None:
        torch.compiler.reset()
        self.inner = Model()
        self.model: Any = torch.compile(self.inner, backend="eager") if compiled else self.inner
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.0)
        self.session = hookline.attach(self.model, self.optimizer, hooks=[])

    def add(self, edit: Edit, name: str, **options: Any) -> None:
        """Add an edit. What was compiled before does not have it, as a warning would say."""
        self.session.add_hook(edit, name, **options)
        self.step()
        torch.compiler.reset()

    def step(self, n: int = 2) -> float:
        """Run steps, so that changes act, and return the last output."""
        for _ in range(n):
            output = self.model(torch.ones(1))
            output.sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return output.item()


PLACES = {"output": {}, "input": {"where": "input"}, "tap": {"modules": None, "taps": "end"}}


@pytest.mark.parametrize(
    ("compiled", "place"), [(False, "tap"), (False, "input"), (True, "output"), (True, "input")]
)
def test_several_edits_at_one_place_act_in_the_order_of_the_hooks(
    compiled: bool, place: str
) -> None:
    loop, options = Loop(compiled), PLACES[place]
    with loop.session as session:
        loop.add(scale(3, **options), "triple")
        assert loop.step() == 3
        loop.add(add(1, **options), "one", before="triple")
        assert loop.step() == (1 + 1) * 3
        loop.add(add(10, **options), "ten", after="triple")
        assert loop.step() == (1 + 1) * 3 + 10
        for name in ("one", "triple", "ten"):
            session.disable_hook(name)
            loop.step()
            session.enable_hook(name)
            assert loop.step() == (1 + 1) * 3 + 10
        for name in ("one", "triple", "ten"):
            session.disable_hook(name)
        assert loop.step() == 1
        for name in ("ten", "triple", "one"):
            session.enable_hook(name)
        assert loop.step() == (1 + 1) * 3 + 10
        loop.add(add(2, **options), "one", replace=True)
        assert loop.step() == (1 + 2) * 3 + 10
        session.remove_hook("one")
        assert loop.step() == 1 * 3 + 10


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_edit_of_a_module_acts_before_one_of_its_parent_whatever_their_order(
    compiled: bool,
) -> None:
    loop = Loop(compiled)
    with loop.session as session:
        loop.add(scale(3, "outer"), "parent")
        loop.add(add(1, "outer.0"), "child")
        assert loop.step() == (1 + 1) * 3
        for name in ("child", "parent"):
            session.disable_hook(name)
            loop.step()
            session.enable_hook(name)
            assert loop.step() == (1 + 1) * 3


def test_observers_between_edits_see_what_the_edits_before_them_have_made() -> None:
    loop, between = Loop(compiled=False), Capture("first", input=False)
    with loop.session as session:
        loop.add(scale(3), "triple")
        loop.add(between, "between", before="triple")
        loop.add(add(1), "one", before="between")
        assert loop.step() == 6
        assert between["first"].output == 2
        session.disable_hook("one")
        loop.step()
        session.enable_hook("one")
        loop.step()
        assert between["first"].output == 2


# -- outside of training --------------------------------------------------------------------------


def test_edits_on_one_module_act_in_the_order_of_a_probe_manager_s_hooks() -> None:
    layer = nn.Identity()
    with Probes(enable_intervention=True) as probes:
        probes.register_probe(layer, "one", add(1, None))
        probes.register_capture_hook(layer, "between", capture_input=False)
        probes.register_probe(layer, "triple", scale(3, None))
        for name in (None, "one", "triple", "between"):
            if name is not None:
                probes.disable_hook(name)
                layer(torch.ones(1))
                probes.enable_hook(name)
            assert layer(torch.ones(1)) == 6
            assert probes.get_captured_states("between")[-1].output == 2
        assert probes.list_hooks() == ["one", "between", "triple"]
