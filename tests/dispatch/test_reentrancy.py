"""Changing and firing from inside a hook, and from several threads."""

import sys
import threading

import pytest

from hookline import Hook, HookManager, HookSettings


class Note(Hook):
    """Appends its letter to a shared list; at its first call it also runs an action."""

    def __init__(self, letter, notes, act=None):
        super().__init__(letter)
        self.letter, self.notes, self.act = letter, notes, act

    def on_step_end(self):
        self.notes.append(self.letter)
        act, self.act = self.act, None
        if act is not None:
            act()


@pytest.fixture
def notes():
    return []


def managed(notes, letters="abc", act=None):
    """Return a manager with hooks a, b, c; b calls `act(manager)` at its first call."""
    manager = HookManager(settings=HookSettings(isolate=False))
    for letter in letters:
        mine = (lambda: act(manager)) if letter == "b" and act else None
        manager.add_hook(Note(letter, notes, mine))
    return manager


def fire_twice(manager, notes):
    manager.fire("on_step_end")
    first = "".join(notes)
    notes.clear()
    manager.fire("on_step_end")
    return first, "".join(notes)


@pytest.mark.parametrize("action", ["disable_hook", "remove_hook"])
class TestSwitchingOff:
    def test_a_hook_can_turn_itself_off(self, notes, action):
        manager = managed(notes, act=lambda m: getattr(m, action)("b"))
        assert fire_twice(manager, notes) == ("abc", "ac")

    def test_a_hook_can_turn_off_an_earlier_one(self, notes, action):
        manager = managed(notes, act=lambda m: getattr(m, action)("a"))
        assert fire_twice(manager, notes) == ("abc", "bc")

    def test_a_later_hook_that_is_turned_off_is_not_called_any_more(self, notes, action):
        manager = managed(notes, act=lambda m: getattr(m, action)("c"))
        assert fire_twice(manager, notes) == ("ab", "ab")

    def test_turning_all_hooks_off_ends_the_event(self, notes, action):
        def all_off(manager):
            for name in manager.list_hooks():
                getattr(manager, action)(name)

        manager = managed(notes, act=all_off)
        assert fire_twice(manager, notes) == ("ab", "")
        assert manager.dispatchers.on_step_end is None


def test_a_hook_that_is_disabled_and_enabled_is_called_again_from_the_next_event_on(notes):
    def off_and_on(manager):
        manager.disable_hook("c")
        manager.enable_hook("c")

    manager = managed(notes, act=off_and_on)
    assert fire_twice(manager, notes) == ("ab", "abc")


# -- a hook that fires events ----------------------------------------------------------------------


def test_a_hook_can_fire_its_own_event_within_itself():
    manager = HookManager(settings=HookSettings(isolate=False))
    seen = []

    class Countdown(Hook):
        def on_step_end(self, step):
            seen.append(("down", step))
            if step:
                manager.fire("on_step_end", step=step - 1)

    class Other(Hook):
        def on_step_end(self, step):
            seen.append(("other", step))

    manager.register_hooks([Countdown(), Other()])
    manager.fire("on_step_end", step=2)
    assert seen == [
        ("down", 2),
        ("down", 1),
        ("down", 0),
        ("other", 0),
        ("other", 1),
        ("other", 2),
    ]
    assert {info.name: info.calls for info in manager.describe()} == {"countdown": 3, "other": 3}


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def eager_threads():
    """Make Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*jobs):
    """Run the jobs concurrently and raise their exceptions."""
    barrier = threading.Barrier(len(jobs))
    errors = []

    def run(job):
        try:
            barrier.wait(10)
            job()
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Count(Hook):
    def __init__(self):
        self.steps = []  # appending is atomic, counting would not be

    def on_step_end(self, step):
        self.steps.append(step)


@pytest.mark.usefixtures("eager_threads")
def test_several_threads_fire_and_nothing_is_lost():
    manager = HookManager([hook := Count()])
    manager.add_hook(thin := Count(), "thin", every=2)

    def fire():
        for step in range(1, 501):
            manager.fire("on_step_end", step=step)

    in_threads(*[fire] * 4)
    assert sorted(hook.steps) == sorted(list(range(1, 501)) * 4)
    assert sorted(thin.steps) == sorted(list(range(2, 501, 2)) * 4)
    assert manager.get_hook("thin") is thin
    assert {info.name: info.calls for info in manager.describe()} == {"count": 2000, "thin": 1000}


@pytest.mark.usefixtures("eager_threads")
def test_a_hook_is_not_called_any_more_after_a_thread_has_disabled_it():
    manager = HookManager()

    class Mine(Hook):
        def __init__(self, name):
            super().__init__(name)
            self.thread = name
            self.off = False
            self.wrong = 0

        def on_epoch_end(self, trainer):
            if trainer == self.thread and self.off:
                self.wrong += 1

    def job(name):
        hook = Mine(name)

        def run():
            manager.add_hook(hook)
            for _ in range(100):
                hook.off = False
                manager.enable_hook(name)
                manager.fire("on_epoch_end", trainer=name)
                manager.disable_hook(name)
                hook.off = True
                manager.fire("on_epoch_end", trainer=name)

        return hook, run

    hooks, jobs = zip(*(job(f"thread {i}") for i in range(4)), strict=True)
    in_threads(*jobs)
    assert [hook.wrong for hook in hooks] == [0] * 4
    assert len(manager) == 4


def test_a_blocking_hook_does_not_block_other_threads():
    manager = HookManager()
    inside, go = threading.Event(), threading.Event()
    slow, other = Hook("slow"), Count()
    slow.on_epoch_end = lambda: (inside.set(), go.wait(10))
    manager.register_hooks([slow, other])
    thread = threading.Thread(target=manager.fire, args=("on_epoch_end",))
    thread.start()
    assert inside.wait(10)
    manager.fire("on_step_end", step=1)
    manager.disable_hook("count")
    manager.fire("on_step_end", step=2)
    assert thread.is_alive()
    go.set()
    thread.join()
    assert other.steps == [1]
