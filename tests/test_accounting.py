"""What hooks cost: calls are exact, time is estimated from samples."""

import json
import random
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loops import fire_steps

from hookline import Hook, HookManager, HookSettings


class Count(Hook):
    def __init__(self, name=None):
        super().__init__(name)
        self.calls = 0

    def on_step_end(self):
        self.calls += 1


class Burn(Hook):
    """Uses processor time, and measures it itself."""

    def __init__(self, name, seconds):
        super().__init__(name)
        self.each = seconds
        self.spent = 0.0

    def on_step_end(self):
        start = perf_counter()
        while perf_counter() - start < self.each:
            pass
        self.spent += perf_counter() - start


def calls(manager):
    return {info.name: info.calls for info in manager.describe()}


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_calls_are_counted_exactly(count):
    manager = HookManager([hook := Count()])
    fire_steps(manager, range(count))
    assert calls(manager) == {"count": count}
    assert hook.calls == count


def test_calls_of_all_events_of_a_hook_are_added_up():
    hook = Count()
    hook.on_epoch_end = lambda: None
    manager = HookManager([hook])
    fire_steps(manager, range(10))
    manager.fire("on_epoch_end")
    assert calls(manager) == {"count": 11}


def test_only_due_calls_of_a_scheduled_hook_are_counted():
    manager = HookManager()
    manager.add_hook(every := Count(), "every", every=7)
    manager.add_hook(sampled := Count(), "sampled", sample_rate=0.3)
    manager.add_hook(Count(), "always")
    fire_steps(manager, range(1, 501))
    assert calls(manager) == {"every": 71, "sampled": sampled.calls, "always": 500}
    assert every.calls == 71


def test_describing_in_between_does_not_count_twice():
    manager = HookManager([Count("a")])
    manager.add_hook(Count(), "thin", every=2)
    for step in range(1, 21):
        fire_steps(manager, [step])
        manager.summary()
    assert calls(manager) == {"a": 20, "thin": 10}


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


def test_a_hook_that_is_disabled_before_its_call_is_not_counted():
    manager = HookManager()
    first = Hook("first")
    first.on_step_end = lambda: manager.disable_hook("second")
    manager.register_hooks([first, second := Count("second")])
    fire_steps(manager, [1])
    assert second.calls == 0
    assert calls(manager) == {"first": 1, "second": 0}


def test_a_scheduled_hook_is_counted_also_when_another_changes_something_before_its_call():
    manager = HookManager()
    busy = Hook("busy")
    busy.on_step_end = lambda step: manager.add_hook(Hook(f"new {step}"))
    change = Hook("change")
    change.on_step_end = lambda: manager.add_hook(Count())
    manager.register_hooks([busy, change])
    manager.add_hook(thin := Count(), "thin", every=2, after="change")
    fire_steps(manager, range(1, 21))
    assert thin.calls == 10
    assert calls(manager)["thin"] == 10


def test_a_scheduled_hook_after_a_slow_one_is_counted_from_its_first_call_on():
    manager = HookManager([Burn("slow", 100e-6)])
    manager.add_hook(thin := Count(), "thin", every=2)
    fire_steps(manager, range(2, 12))
    assert thin.calls == 5
    assert calls(manager) == {"slow": 10, "thin": 5}


def test_a_call_is_counted_also_when_hooks_changed_just_before_it():
    """This happens when another thread changes them between look-up and call."""
    manager = HookManager([hook := Count()])
    fire_steps(manager, [1])
    dispatch = manager.dispatchers.on_step_end
    manager.add_hook(Hook("other"))
    manager.add_hook(Count(), "new")
    dispatch(SimpleNamespace())
    fire_steps(manager, [2])
    assert hook.calls == 3
    assert calls(manager)["count"] == 3


def test_a_hook_disabled_just_before_a_call_is_neither_called_nor_counted():
    """This happens when another thread disables it between look-up and call."""
    manager = HookManager([hook := Count("off"), stays := Count("stays")])
    fire_steps(manager, [1])
    dispatch = manager.dispatchers.on_step_end
    manager.disable_hook("off")
    dispatch(SimpleNamespace())
    assert (hook.calls, stays.calls) == (1, 2)
    assert calls(manager) == {"off": 1, "stays": 2}


def test_an_event_without_a_required_argument_counts_no_call():
    hook = Hook("watch")
    hook.on_step_end = lambda loss: None
    manager = HookManager([hook])
    with pytest.raises(Exception, match="without 'loss'"):
        fire_steps(manager, [1])
    assert calls(manager) == {"watch": 0}


def test_a_removed_hook_stays_in_the_summary_until_the_end_of_the_run():
    manager = HookManager([Count("warm up")])
    fire_steps(manager, range(5))
    manager.remove_hook("warm up")
    assert [(hook.name, hook.calls) for hook in manager.summary().hooks] == [("warm up", 5)]


def test_a_hook_removed_before_its_call_is_not_counted_in_that_event():
    manager = HookManager()
    first = Hook("first")
    first.on_step_end = lambda step: step == 3 and manager.remove_hook("second")
    manager.register_hooks([first, second := Count("second")])
    fire_steps(manager, [1, 2, 3])
    assert second.calls == 2
    assert {hook.name: hook.calls for hook in manager.summary().hooks}["second"] == 2


# -- time ------------------------------------------------------------------------------------------


def test_the_time_of_a_slow_hook_is_measured():
    manager = HookManager([hook := Burn("slow", 200e-6)])
    fire_steps(manager, range(300))
    (info,) = manager.describe()
    assert hook.spent / 2 < info.seconds < hook.spent * 3


def test_the_time_of_a_quick_hook_is_estimated():
    manager = HookManager([hook := Burn("quick", 5e-6)])
    fire_steps(manager, range(5000))
    (info,) = manager.describe()
    # Not below a share of `spent`, which includes the time in which other processes ran.
    assert 5000 * hook.each < info.seconds < hook.spent * 5


def test_the_time_of_a_rarely_called_hook_is_measured():
    manager = HookManager()
    manager.add_hook(hook := Burn("rare", 300e-6), every=50)
    fire_steps(manager, range(1, 1001))
    (info,) = manager.describe()
    assert info.calls == 20
    assert hook.spent / 2 < info.seconds < hook.spent * 3


def test_a_hook_that_becomes_slow_later_is_measured():
    manager = HookManager([hook := Burn("later", 0.0)])
    fire_steps(manager, range(500))
    hook.each = 100e-6
    fire_steps(manager, range(1000))
    (info,) = manager.describe()
    assert hook.spent / 3 < info.seconds < hook.spent * 3


def test_slower_hooks_cost_more():
    manager = HookManager([Burn("quick", 10e-6), Burn("slow", 1e-3), Burn("slower", 4e-3)])
    fire_steps(manager, range(40))
    by_cost = sorted(manager.summary().hooks, key=lambda hook: -hook.seconds)
    assert [hook.name for hook in by_cost] == ["slower", "slow", "quick"]


def test_a_share_is_the_part_of_the_run_that_was_spent_in_a_hook():
    manager = HookManager([Burn("half", 300e-6)])
    manager.run_started()
    idle = Burn("idle", 300e-6)
    for step in range(200):
        fire_steps(manager, [step])
        idle.on_step_end()
    manager.run_ended()
    summary = manager.summary()
    assert 0.25 < summary.share < 0.75
    assert summary.share == pytest.approx(summary.hooks[0].seconds / summary.seconds)
    assert manager.summary().seconds == summary.seconds  # the clock has stopped


def test_hooks_have_no_cost_before_the_first_event():
    summary = HookManager([Count()]).summary()
    assert (summary.seconds, summary.share) == (0.0, 0.0)
    assert summary.hooks[0].calls == 0


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


def test_over_the_budget_the_costliest_hook_is_named_once(caplog):
    settings = HookSettings(budget=0.05, budget_after=0.0)
    manager = HookManager([Burn("cheap", 20e-6), Burn("costly", 400e-6)], settings=settings)
    end = perf_counter() + 2.5  # the budget is checked once a second
    while perf_counter() < end:
        fire_steps(manager, range(100))
    (message,) = over_budget(caplog)
    assert "'costly'" in message
    assert "budget of 5.0%" in message


def test_the_budget_is_not_checked_too_early(caplog):
    manager = HookManager([Burn("costly", 100e-6)], settings=HookSettings(budget_after=3600))
    fire_steps(manager, range(300))
    assert over_budget(caplog) == []


def test_within_the_budget_no_hook_is_named(caplog):
    settings = HookSettings(budget=1.5, budget_after=0.0)
    fire_steps(HookManager([Burn("costly", 100e-6)], settings=settings), range(300))
    assert over_budget(caplog) == []


def test_without_a_budget_no_hook_is_named(caplog):
    settings = HookSettings(budget=None, budget_after=0.0)
    fire_steps(HookManager([Burn("costly", 100e-6)], settings=settings), range(300))
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
