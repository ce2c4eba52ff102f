"""The cost of hooks: calls are exact, time is estimated from samples."""

import json
import random

import numpy as np
import pytest
import torch
from fake_clock import FakeClock
from loops import fire_steps

from hookline import Hook, HookManager
from hookline.dispatch import accounting, dispatcher


class Count(Hook):
    def __init__(self, name=None):
        super().__init__(name)
        self.calls = 0

    def on_step_end(self):
        self.calls += 1


@pytest.fixture
def clock(monkeypatch):
    return FakeClock(monkeypatch, accounting, dispatcher)


class Slow(Hook):
    """Takes so many seconds of a clock in each call."""

    def __init__(self, name, clock, seconds):
        super().__init__(name)
        self.clock = clock
        self.each = seconds
        self.spent = 0.0

    def on_step_end(self):
        self.clock.wait(self.each)
        self.spent += self.each


def calls(manager):
    return {info.name: info.calls for info in manager.describe()}


# -- calls -----------------------------------------------------------------------------------------


def test_calls_survive_toggles_and_changes():
    manager = HookManager([a := Count("a"), b := Count("b")])
    manager.add_hook(thin := Count(), "thin", every=3)
    for step in range(1, 301):
        if step % 10 == 0:
            manager.disable_hook("b")
        if step % 10 == 5:
            manager.enable_hook("b")
        if step % 50 == 0:
            manager.add_hook(Count(f"new {step}"))
        fire_steps(manager, [step])
    counted = calls(manager)
    assert counted["a"] == a.calls == 300
    assert counted["b"] == b.calls < 300
    assert counted["thin"] == thin.calls == 100


def test_a_removed_hook_stays_in_the_summary_until_the_end_of_the_run():
    manager = HookManager([Count("warm up")])
    fire_steps(manager, range(5))
    manager.remove_hook("warm up")
    assert [(hook.name, hook.calls) for hook in manager.summary().hooks] == [("warm up", 5)]


# -- time ------------------------------------------------------------------------------------------


def test_the_time_of_a_slow_hook_is_measured(clock):
    manager = HookManager([hook := Slow("slow", clock, 200e-6)])
    fire_steps(manager, range(300))
    (info,) = manager.describe()
    assert info.seconds == pytest.approx(hook.spent)


def test_the_time_of_a_quick_hook_is_estimated(clock):
    manager = HookManager([hook := Slow("quick", clock, 5e-6)])
    fire_steps(manager, range(5000))
    (info,) = manager.describe()
    assert info.seconds == pytest.approx(hook.spent)


def test_a_hook_that_becomes_slow_later_is_measured(clock):
    manager = HookManager([hook := Slow("later", clock, 0.0)])
    fire_steps(manager, range(500))
    hook.each = 100e-6
    fire_steps(manager, range(1000))
    (info,) = manager.describe()
    assert hook.spent * 0.6 < info.seconds <= hook.spent  # up to 383 calls until it is noticed


def test_a_share_is_the_part_of_the_run_that_was_spent_in_a_hook(clock):
    manager = HookManager([Slow("quarter", clock, 300e-6)])
    manager.run_started()
    for step in range(200):
        fire_steps(manager, [step])
        clock.wait(900e-6)
    manager.run_ended()
    summary = manager.summary()
    assert summary.share == pytest.approx(0.25)
    assert summary.share == pytest.approx(summary.hooks[0].seconds / summary.seconds)
    clock.wait(1)
    assert manager.summary().seconds == summary.seconds  # the clock has stopped


# -- the summary -----------------------------------------------------------------------------------


def test_the_summary_prints_as_a_table():
    manager = HookManager([Count("first"), Count("second hook")])
    manager.disable_hook("second hook")
    fire_steps(manager, range(12))
    header, first, second = str(manager.summary()).splitlines()
    assert header.split() == ["hook", "calls", "time", "share", "failures", "status"]
    assert first.split()[:2] == ["first", "12"]
    assert first.split()[-2:] == ["0", "enabled"]
    assert second.split()[:3] == ["second", "hook", "0"]
    assert second.split()[-1] == "disabled"
    assert first.index("12") == second.index(" 0 ") + 1 == header.index("calls")


def test_the_summary_is_plain_data_too():
    manager = HookManager([Count("a")])
    fire_steps(manager, range(3))
    data = json.loads(json.dumps(manager.summary().as_dict()))
    assert data["seconds"] > 0
    (hook,) = data["hooks"]
    assert (hook["name"], hook["calls"], hook["events"]) == ("a", 3, ["on_step_end"])


# -- the budget ------------------------------------------------------------------------------------


def over_budget(caplog):
    return [r.getMessage() for r in caplog.records if "over the budget" in r.getMessage()]


def train(manager, clock, steps, seconds):
    """Fire `on_step_end` for steps that each take so many seconds, apart from hooks."""
    for step in steps:
        clock.wait(seconds)
        fire_steps(manager, [step])


def test_over_the_budget_the_costliest_hook_is_named_once(caplog, clock):
    manager = HookManager([Slow("cheap", clock, 1e-3), Slow("costly", clock, 0.1)])
    train(manager, clock, range(1, 3000), 0.5)
    (message,) = over_budget(caplog)
    assert "Hooks take 16.8% of the run, over the budget of 5.0%. The costliest is" in message
    assert "`hookline.every(100, hook)` in a list of hooks" in message
    assert "'costly'" in message
    assert "with 16.6%" in message


def test_the_first_steps_are_no_evidence_about_the_budget(caplog, clock):
    """The first calls of a hook import, allocate and compile."""
    manager = HookManager([hook := Slow("late", clock, 100.0)])
    train(manager, clock, range(1, 4), 0.5)
    hook.each = 1e-3
    train(manager, clock, range(4, 3000), 0.5)
    assert manager.summary().share > 0.05
    assert over_budget(caplog) == []


def test_the_budget_of_a_resumed_run_is_about_its_own_steps(caplog, clock):
    manager = HookManager([hook := Slow("late", clock, 100.0)])
    train(manager, clock, range(10_001, 10_004), 0.5)
    hook.each = 1e-3
    train(manager, clock, range(10_004, 13_000), 0.5)
    assert over_budget(caplog) == []


# -- random numbers --------------------------------------------------------------------------------


def test_dispatching_does_not_consume_random_numbers():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    manager = HookManager([Count()])
    manager.add_hook(Count(), "sampled", sample_rate=0.5)
    fire_steps(manager, range(1000))
    manager.summary()
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.get_rng_state().tolist() == states[2]
