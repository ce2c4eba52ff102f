"""A running loop that does not provide what a hook asks for."""

import pytest

from hookline import Hook, HookFailedError, HookManager, NotProvidedError


class Loop:
    """A loop that provides its step, but neither loss nor epoch."""

    step = step_in_progress = 2

    @property
    def loss(self):
        raise NotProvidedError("This loop does not provide the loss. Call session.backward(loss).")

    epoch = loss


class Note(Hook):
    def __init__(self):
        self.seen = []

    def on_step_end(self, step):
        self.seen.append(step)


class WantsLoss(Hook):
    def on_step_end(self, loss):
        raise AssertionError("there is no loss")


def fire(manager, times=1):
    for _ in range(times):
        if manager.dispatchers.on_step_end is not None:
            manager.dispatchers.on_step_end(Loop())


def test_a_hook_that_lacks_an_argument_is_disabled_and_the_message_says_what_to_call(caplog):
    manager = HookManager([WantsLoss()])
    fire(manager, times=3)
    (record,) = caplog.records
    assert "'wants_loss'" in record.getMessage()
    assert "DISABLED" in record.getMessage()
    assert "session.backward(loss)" in record.getMessage()
    assert manager.describe()[0].status == "failed"
    assert manager.summary().failures == {"wants_loss": 1}


@pytest.mark.parametrize("schedule", [{}, {"every": 2}, {"from_epoch": 1}])
@pytest.mark.parametrize("place", ["first", "last"])
def test_the_other_hooks_are_called_once_in_the_event_that_lacks_an_argument(schedule, place):
    manager = HookManager([before := Note()])
    manager.add_hook(WantsLoss(), **schedule, before="note" if place == "first" else None)
    manager.add_hook(after := Note(), "after")
    fire(manager)
    assert (before.seen, after.seen) == ([2], [2])
    fire(manager)
    assert (before.seen, after.seen) == ([2, 2], [2, 2])


def test_a_hook_that_is_not_due_may_lack_an_argument():
    manager = HookManager([note := Note()])
    manager.add_hook(WantsLoss(), every=3)
    fire(manager)
    assert manager.describe()[1].status == "enabled"
    assert note.seen == [2]


def test_a_strict_hook_that_lacks_an_argument_stops_training():
    manager = HookManager()
    manager.add_hook(WantsLoss(), strict=True)
    with pytest.raises(HookFailedError, match=r"'wants_loss'.*session\.backward\(loss\)"):
        fire(manager)


def test_a_loop_that_has_not_taken_its_first_step_gets_the_error_at_once_and_no_hook_is_disabled():
    manager = HookManager([WantsLoss()])
    manager.raise_on_missing_args = True
    with pytest.raises(NotProvidedError, match=r"session\.backward") as caught:
        fire(manager)
    assert "wants_loss" in str(caught.value)
    assert manager.describe()[0].status == "enabled"
