"""A hook that fails does not stop training, unless training depends on it."""

import bdb
import logging

import pytest
from loops import fire_steps

from hookline import (
    Hook,
    HookFailedError,
    HookManager,
    HookSettings,
    TrainingError,
)


class Failing(Hook):
    """Fails in the given steps, or in all if none are given."""

    def __init__(self, *steps, error=None):
        self.fails = steps
        self.error = error or ValueError("no luck")
        self.called = []

    def on_step_end(self, step):
        self.called.append(step)
        if not self.fails or step in self.fails:
            raise self.error

    def on_epoch_end(self, epoch):
        raise self.error


class Sound(Hook):
    def __init__(self):
        self.called = []

    def on_step_end(self, step):
        self.called.append(step)


class Critical(Failing):
    critical = True


def info(manager, name):
    return next(hook for hook in manager.describe() if hook.name == name)


# -- isolation -------------------------------------------------------------------------------------


def test_the_hooks_before_and_after_a_failing_one_still_run():
    manager = HookManager([before := Sound(), Failing(), after := Sound()])
    manager.fire("on_step_end", step=1)
    assert (before.called, after.called) == ([1], [1])


def test_a_failure_is_logged_with_its_traceback(caplog):
    error = ValueError("no luck")
    HookManager([Failing(error=error)]).fire("on_step_end", step=1)
    (record,) = caplog.records
    assert record.name.startswith("hookline")
    assert record.levelno == logging.ERROR
    assert "'failing'" in record.getMessage()
    assert "Failing.on_step_end" in record.getMessage()
    assert "ValueError: no luck" in record.getMessage()
    assert record.exc_info[1] is error
    assert "raise self.error" in caplog.text  # the line that failed


# -- disabled after repeated failures --------------------------------------------------------------


def test_a_hook_that_fails_three_times_in_a_row_is_disabled_with_an_error_message(caplog):
    manager = HookManager([hook := Failing()])
    fire_steps(manager, range(1, 10))
    assert hook.called == [1, 2, 3]
    assert info(manager, "failing").status == "failed"
    assert manager.dispatchers.on_step_end is None
    (record,) = [r for r in caplog.records if "DISABLED" in r.getMessage()]
    assert "'failing'" in record.getMessage()
    assert "failed 3 times in a row" in record.getMessage()
    assert "enable_hook('failing')" in record.getMessage()
    assert record.levelno == logging.ERROR


def test_a_success_in_between_keeps_a_hook_enabled():
    manager = HookManager([hook := Failing(1, 2, 4, 5, 7, 8)])
    fire_steps(manager, range(1, 10))
    assert hook.called == list(range(1, 10))
    assert info(manager, "failing").failures == 6


def test_a_hook_disabled_after_failures_stays_registered_and_can_be_enabled_again():
    manager = HookManager([hook := Failing(1, 2, 3)])
    fire_steps(manager, range(1, 6))
    assert manager.list_hooks() == ["failing"]
    manager.enable_hook("failing")
    assert info(manager, "failing").status == "enabled"
    fire_steps(manager, [6])
    assert hook.called == [1, 2, 3, 6]


def test_a_failed_hook_is_not_enabled_and_can_be_disabled_by_the_user():
    manager = HookManager([Failing()])
    fire_steps(manager, range(1, 4))
    assert (info(manager, "failing").status, info(manager, "failing").enabled) == ("failed", False)
    manager.disable_hook("failing")
    assert info(manager, "failing").status == "disabled"
    manager.remove_hook("failing")
    (removed,) = manager.summary().hooks
    assert (removed.status, removed.enabled, removed.failures) == ("removed", False, 3)


# -- hooks that training depends on ----------------------------------------------------------------


def test_a_failing_critical_hook_stops_training_with_a_clear_error():
    error = ValueError("no luck")
    manager = HookManager([Critical(error=error)])
    with pytest.raises(HookFailedError, match=r"'critical' failed in Critical\.on_step_end") as e:
        manager.fire("on_step_end", step=1)
    assert "ValueError: no luck" in str(e.value)
    assert e.value.__cause__ is error
    assert info(manager, "critical").failures == 1


def test_a_hookline_error_that_ends_training_is_raised_and_not_logged(caplog):
    with pytest.raises(HookFailedError, match="no luck"):
        HookManager([Critical(error=TrainingError("no luck"))]).fire("on_step_end", step=1)
    assert caplog.text == ""
    first, second = (Critical(error=TrainingError(word)) for word in ("one", "two"))
    manager = HookManager([first, second])
    with pytest.raises(HookFailedError, match="TrainingError: one") as caught:
        manager.fire("on_step_end", step=1)
    assert caught.value.__notes__ == [
        "The hook 'critical_2' failed in Critical.on_step_end, and training depends on it: "
        "TrainingError: two"
    ]
    assert caplog.text == ""
    assert "TrainingError" not in str(manager.summary())
    assert manager.describe()[0].last_error == "TrainingError: one"


def test_a_critical_failure_in_an_event_that_a_hook_fired_stops_training_too():
    manager = HookManager()

    class Saver(Hook):
        critical = True

        def on_checkpoint_save(self):
            raise OSError("disk full")

    class Trigger(Hook):
        def on_step_end(self):
            manager.fire("on_checkpoint_save")

    manager.register_hooks([Trigger(), Saver()])
    with pytest.raises(HookFailedError, match=r"'saver'.*disk full"):
        manager.fire("on_step_end")


# -- what is never isolated ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), bdb.BdbQuit()])
def test_ctrl_c_exit_and_a_debuggers_quit_pass_through_at_once(error, caplog):
    manager = HookManager([Failing(error=error), after := Sound()])
    with pytest.raises(type(error)) as caught:
        manager.fire("on_step_end", step=1)
    assert caught.value is error
    assert after.called == []
    assert info(manager, "failing").failures == 0
    assert caplog.records == []


def test_isolation_can_be_turned_off_for_debugging():
    error = ValueError("no luck")
    manager = HookManager([Failing(error=error)], settings=HookSettings(isolate=False))
    with pytest.raises(ValueError, match="no luck") as caught:
        manager.fire("on_step_end", step=1)
    assert caught.value is error
    assert caught.traceback[-1].name == "on_step_end"


# -- a hint ----------------------------------------------------------------------------------------
