"""HookManager: registration, names, toggles, and firing by hand."""

import gc
import pickle
import weakref

import pytest

from hookline import (
    Hook,
    HookManager,
    NameTakenError,
    NotAHookError,
    SignatureError,
    UnknownEventError,
    UnknownHookError,
)
from hookline.events import NAMES


class Watch(Hook):
    def __init__(self, name=None):
        super().__init__(name)
        self.steps = []

    def on_step_end(self, step):
        self.steps.append(step)


class LRMonitorHook(Hook):
    pass


# -- adding and removing ---------------------------------------------------------------------------


def test_a_pickled_manager_has_its_hooks_with_names_order_and_schedules():
    manager = HookManager([Watch("a")])
    manager.add_hook(Watch(), "b", every=5, before="a", enabled=False, strict=True)
    copied = pickle.loads(pickle.dumps(manager))
    assert copied.list_hooks() == ["b", "a"]
    assert copied.describe() == manager.describe()
    copied.fire("on_step_end", step=1)
    assert copied.get_hook("a").steps == [1]
    assert manager.get_hook("a").steps == []


def test_a_removed_hook_is_returned_and_not_called_any_more():
    manager = HookManager([hook := Watch()])
    assert manager.remove_hook("watch") is hook
    manager.fire("on_step_end", step=1)
    assert hook.steps == []
    assert manager.list_hooks() == []


def test_a_removed_hook_can_be_garbage_collected():
    manager = HookManager([Watch(), Watch()])
    manager.fire("on_step_end", step=1)
    gone = weakref.ref(manager.get_hook("watch"))
    manager.remove_hook("watch")
    manager.fire("on_step_end", step=2)
    gc.collect()
    assert gone() is None


# -- toggles ---------------------------------------------------------------------------------------


def test_a_disabled_hook_is_not_called_until_it_is_enabled_again():
    manager = HookManager([hook := Watch()])
    manager.fire("on_step_end", step=1)
    manager.disable_hook("watch")
    manager.fire("on_step_end", step=2)
    manager.enable_hook("watch")
    manager.fire("on_step_end", step=3)
    assert hook.steps == [1, 3]


def test_on_change_is_called_after_every_change():
    changes = []
    manager = HookManager(on_change=lambda: changes.append(manager.list_hooks()))
    manager.add_hook(Watch())
    manager.disable_hook("watch")
    manager.enable_hook("watch")
    manager.remove_hook("watch")
    assert changes == [["watch"], ["watch"], ["watch"], []]


def manager_with_failing_callback():
    """Return a manager whose `on_change` raises when `no` is in the list."""
    no = []

    def fail():
        if no:
            raise RuntimeError("not now")

    return HookManager([Watch("a"), Watch("b")], on_change=fail), no


def test_a_change_is_undone_when_on_change_raises():
    manager, no = manager_with_failing_callback()
    no.append("no")
    with pytest.raises(RuntimeError, match="not now"):
        manager.add_hook(new := Watch("c"))
    with pytest.raises(RuntimeError, match="not now"):
        manager.remove_hook("a")
    with pytest.raises(RuntimeError, match="not now"):
        manager.add_hook(new, "b", replace=True)
    assert manager.list_hooks() == ["a", "b"]
    manager.fire("on_step_end", step=1)
    assert new.steps == []
    assert manager.get_hook("a").steps == manager.get_hook("b").steps == [1]


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        ("Watch", "watch"),
        ("LRMonitorHook", "lr_monitor_hook"),
        ("HTTPServer2Hook", "http_server2_hook"),
        ("_Private", "private"),
        ("lower", "lower"),
    ],
)
def test_a_hook_without_a_name_gets_its_class_in_snake_case(cls, name):
    hook = type(cls, (Hook,), {})()
    assert HookManager([hook]).list_hooks() == [name]


def test_a_given_name_that_is_taken_raises_an_error():
    manager = HookManager([first := Watch("mine")])
    with pytest.raises(NameTakenError, match=r"'mine' is taken.*replace=True"):
        manager.add_hook(Watch(), "mine")
    with pytest.raises(ValueError, match="taken"):
        manager.add_hook(Watch("mine"))
    assert manager.get_hook("mine") is first
    assert len(manager) == 1


def test_a_hook_can_replace_another_of_its_name():
    manager = HookManager([Watch("a"), old := Watch("b"), Watch("c")])
    assert manager.add_hook(new := Watch(), "b", replace=True) == "b"
    manager.fire("on_step_end", step=1)
    assert (old.steps, new.steps) == ([], [1])
    assert manager.list_hooks() == ["a", "b", "c"]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 3, "watch", print, object(), [Watch()]])
def test_only_hooks_are_accepted_and_the_error_says_what_to_inherit_from(thing):
    manager = HookManager()
    with pytest.raises(TypeError, match=r"class MyHook\(hookline\.Hook\)"):
        manager.add_hook(thing)
    assert manager.list_hooks() == []


def test_a_class_instead_of_an_instance_raises_an_error_that_shows_the_call():
    with pytest.raises(NotAHookError, match=r"Watch is a class.*Watch\(\)"):
        HookManager().add_hook(Watch)


@pytest.mark.parametrize("action", ["get_hook", "remove_hook", "enable_hook", "disable_hook"])
def test_the_error_for_an_unknown_name_lists_the_nearest_and_the_known_ones(action):
    manager = HookManager([Watch(), LRMonitorHook()])
    with pytest.raises(UnknownHookError) as caught:
        getattr(manager, action)("watc")
    message = str(caught.value)
    assert message.startswith("There is no hook 'watc'. Did you mean 'watch'?")
    assert "'lr_monitor_hook'" in message
    assert isinstance(caught.value, KeyError)


def test_a_failed_registration_changes_nothing():
    class Wrong(Hook):
        def on_step_ending(self):
            pass

    manager = HookManager([hook := Watch()])
    with pytest.raises(SignatureError):
        manager.add_hook(Wrong())
    with pytest.raises(UnknownHookError):
        manager.add_hook(Watch(), before="nobody")
    with pytest.raises(ValueError, match="every"):
        manager.add_hook(Watch(), every=0)
    manager.fire("on_step_end", step=1)
    assert manager.list_hooks() == ["watch"]
    assert hook.steps == [1]


# -- describing ------------------------------------------------------------------------------------


def test_describe_lists_the_hooks_in_calling_order():
    manager = HookManager([Watch(), LRMonitorHook()])
    manager.add_hook(Watch(), "thin", every=10, sample_rate=0.5, from_epoch=2, before="watch")
    manager.disable_hook("watch")
    thin, watch, monitor = manager.describe()
    assert (thin.name, watch.name, monitor.name) == ("thin", "watch", "lr_monitor_hook")
    assert thin.schedule == "every 10, sample 0.5, from epoch 2"
    assert (watch.enabled, watch.status, watch.schedule) == (False, "disabled", "always")
    assert (thin.enabled, thin.status) == (True, "enabled")
    assert watch.cls == f"{__name__}.Watch"
    assert watch.kind == "loop"
    assert watch.events == ("on_step_end",)
    assert monitor.events == ()
    assert (watch.failures, watch.last_error, watch.calls) == (0, None, 0)


# -- firing by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [[], [Watch()]])
def test_firing_with_an_unknown_argument_names_the_nearest_also_when_no_hook_listens(hooks):
    with pytest.raises(UnknownEventError, match=r"on_step_end has no argument 'stepp'.*'step'"):
        HookManager(hooks).fire("on_step_end", stepp=1)


def test_arguments_that_are_not_given_come_from_the_source():
    class Source:
        step = 41

    manager = HookManager([hook := Watch()], source=Source())
    manager.fire("on_step_end")
    manager.fire("on_step_end", step=42)
    assert hook.steps == [41, 42]


@pytest.mark.parametrize("name", NAMES)
def test_the_manager_has_a_method_for_each_event_and_alias(name):
    hook = Hook()
    seen = []
    setattr(hook, name, lambda status: seen.append(status))
    manager = HookManager([hook])
    getattr(manager, name)(status="training")
    getattr(manager, NAMES[name])(status="completed")
    assert seen == ["training", "completed"]


@pytest.mark.parametrize(
    ("event", "values", "named"),
    [
        ("on_train_begin", ("state",), {"state": "state"}),
        ("on_epoch_begin", (3, "state"), {"epoch": 3, "state": "state"}),
        ("on_batch_end", (7, 0.5, "state"), {"batch_idx": 7, "loss": 0.5, "state": "state"}),
        ("on_epoch_end", (3, "state"), {"epoch": 3, "state": "state"}),
        ("on_train_end", ("state",), {"state": "state"}),
    ],
)
def test_a_small_trainers_loop_may_call_by_position(event, values, named):
    hook = Hook()
    seen = []
    setattr(hook, event, lambda **everything: seen.append(everything))
    getattr(HookManager([hook]), event)(*values)
    assert seen == [named]


def test_one_hook_instead_of_a_list_says_what_to_write():
    class Watch(Hook):
        pass

    with pytest.raises(TypeError, match=r"hooks takes a list of hooks\. Write hooks=\[Watch"):
        HookManager(Watch())
