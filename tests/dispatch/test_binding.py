"""Matching of hook methods with events, and of parameters with arguments."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline import DebugHook, ForwardHook, Hook, HookManager, HookSettings, SignatureError
from hookline.events import EVENTS


def fire(hook, event, **arguments):
    """Register the hook and fire the event; its exceptions are raised."""
    HookManager([hook], settings=HookSettings(isolate=False)).fire(event, **arguments)


def registration_error(hook):
    """Return the message of the registration error, after which no hook is registered."""
    manager = HookManager()
    with pytest.raises(SignatureError) as caught:
        manager.add_hook(hook)
    assert manager.list_hooks() == []
    return str(caught.value)


class Seen(Hook):
    """Collects what its subclasses were called with."""

    def __init__(self):
        self.seen = []


# -- names, aliases, order -------------------------------------------------------------------------


def test_a_method_gets_the_arguments_it_declares_in_its_own_order():
    class Watch(Seen):
        def on_step_end(self, lr, step, loss):
            self.seen.append((lr, step, loss))

    fire(hook := Watch(), "on_step_end", step=7, loss=0.5, grad_norm=2.0, lr=0.1)
    assert hook.seen == [(0.1, 7, 0.5)]


@st.composite
def signatures(draw):
    """Draw an event and a signature with some of its arguments under some of their names."""
    event = EVENTS[draw(st.sampled_from(sorted(EVENTS)))]
    real = draw(st.lists(st.sampled_from(sorted(event.arguments)), unique=True))
    asked = [(draw(st.sampled_from([name, *event.arguments[name].aliases])), name) for name in real]
    name = draw(st.sampled_from([event.name, *event.aliases]))
    only_position = draw(st.integers(0, len(asked)))
    only_keyword = draw(st.integers(only_position, len(asked)))
    first_default = draw(st.integers(only_position, len(asked)))
    return event, name, asked, only_position, only_keyword, first_default


@given(signatures())
def test_any_signature_gets_exactly_the_values_it_names(case):
    event, name, asked, only_position, only_keyword, first_default = case
    parts = []
    for i, (parameter, _) in enumerate(asked):
        if i == only_keyword:
            parts.append("*")
        parts.append(parameter + ("=None" if i >= first_default else ""))
        if i + 1 == only_position:
            parts.append("/")
    inside = ", ".join(f"{real!r}: {parameter}" for parameter, real in asked)
    namespace = {}
    exec(  # the signature is what is being generated
        f"def {name}(self, {', '.join(parts)}):\n    self.seen.append({{{inside}}})", namespace
    )
    hook = type("Generated", (Seen,), {name: namespace[name]})()
    values = {
        name: 0.5 if argument.form == "float" else f"value of {name}"
        for name, argument in event.arguments.items()
    }
    fire(hook, event.name, **values)
    assert hook.seen == [{real: values[real] for _, real in asked}]


# -- errors at registration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "def on_step_ends(self): pass",
            ["Watch.on_step_ends", "Did you mean 'on_step_end'?", "such as '_on_step_ends'"],
        ),
        (
            "def on_step_end(self, losss): pass",
            [
                "Watch.on_step_end",
                "'losss'",
                "Did you mean 'loss'?",
                *EVENTS["on_step_end"].arguments,
            ],
        ),
        ("def on_train_batch_end(self, loader_nam): pass", ["Did you mean 'loader_name'?"]),
        ("def on_step_end(self, *, nothing_like_it): pass", ["'nothing_like_it'"]),
        ("def on_step_end(self, nothing_like_it, /): pass", ["'nothing_like_it'"]),
        ("def on_step_end(self, step=0, /): pass", ["Remove the `/` or the default"]),
        (
            "def on_train_end(self): pass\ndef on_training_end(self): pass",
            ["Watch.on_train_end", "Watch.on_training_end", "same event"],
        ),
        (
            "def on_batch_start(self): pass\non_batch_begin = on_batch_start",
            ["on_train_batch_start"],
        ),
        ("async def on_step_end(self, step): pass", ["Watch.on_step_end is a coroutine"]),
        ("async def on_step_end(self): yield", ["Watch.on_step_end"]),
        ("def on_step_end(self): yield", ["Watch.on_step_end contains `yield`"]),
        (
            "def on_step_end(step, loss): pass",
            ["Watch.on_step_end has no parameter `self`", "'step'", "`def on_step_end(self, …)`"],
        ),
        ("def on_train_end(): pass", ["Watch.on_train_end has no parameter `self`", "missing"]),
        ("on_step_end = 3", ["Watch.on_step_end is a int"]),
        (
            "on_step_end = type",  # its signature depends on the number of arguments
            ["The signature of Watch.on_step_end cannot be read", "Wrap it in a method"],
        ),
    ],
)
def test_what_cannot_be_matched_is_an_error_that_says_what_to_change(body, expected):
    namespace = {}
    exec(body, namespace)
    del namespace["__builtins__"]
    message = registration_error(type("Watch", (Hook,), namespace)())
    assert all(text in message for text in expected), message


def test_a_coroutine_behind_a_decorator_raises_an_error():
    def plain(method):
        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            return method(*args, **kwargs)

        return wrapper

    class Watch(Hook):
        @plain
        async def on_step_end(self, step):
            pass

    assert "Watch.on_step_end is a coroutine" in registration_error(Watch())


def test_a_forward_hook_without_self_raises_an_error():
    class Scale(ForwardHook):
        def __call__(activations):  # noqa: N805 - that is the mistake
            pass

    assert "Scale.__call__ has no parameter `self`" in registration_error(Scale())


def test_a_hook_that_no_event_calls_is_warned_of_with_the_nearest_events(caplog):
    class Watch(Hook):
        def step_end(self, step):
            pass

        def onTrainBatchStart(self):  # noqa: N802 - that is the mistake
            pass

        def summary(self):
            pass

    HookManager([Watch()])
    (record,) = caplog.records
    assert "Watch has no method that is an event, so it is never called." in record.getMessage()
    assert "If 'step_end' is meant to be one, name it 'on_step_end'." in record.getMessage()
    assert (
        "'onTrainBatchStart' is meant to be one, name it 'on_train_batch_start'."
        in record.getMessage()
    )
    assert "summary" not in record.getMessage()


def test_a_hook_that_only_has_a_state_is_not_warned_of(caplog):
    class Position(Hook):
        def state_dict(self):
            return {"at": 3}

    class Scale(ForwardHook):
        def __call__(self, activations):
            pass

    HookManager([Position(), Scale(), DebugHook(check=["loss"])])
    assert caplog.records == []


# -- defaults and collecting parameters ------------------------------------------------------------


def test_a_parameter_with_a_default_keeps_it_where_the_loop_does_not_provide_the_argument():
    class Watch(Seen):
        def on_step_end(self, step, loss=None):
            self.seen.append((step, loss))

    fire(hook := Watch(), "on_step_end", step=1)
    assert hook.seen == [(1, None)]


def test_double_star_gets_all_arguments_by_their_names():
    class Watch(Seen):
        def on_checkpoint_save(self, **everything):
            self.seen.append(everything)

    values = {argument: object() for argument in EVENTS["on_checkpoint_save"].arguments}
    values["checkpoint_path"] = "runs/1"
    fire(hook := Watch(), "on_checkpoint_save", **values)
    assert hook.seen == [values]


# -- every way to write a method -------------------------------------------------------------------


def test_static_and_class_methods_work():
    seen = []

    class Watch(Hook):
        @staticmethod
        def on_step_end(step):
            seen.append(step)

        @classmethod
        def on_epoch_end(cls, epoch):
            seen.append((cls, epoch))

    fire(Watch(), "on_step_end", step=1)
    fire(Watch(), "on_epoch_end", epoch=2)
    assert seen == [1, (Watch, 2)]


def test_a_decorated_method_works():
    def twice(method):
        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            method(*args, **kwargs)
            return method(*args, **kwargs)

        return wrapper

    class Watch(Seen):
        @twice
        def on_step_end(self, step, *, lr):
            self.seen.append((step, lr))

    fire(hook := Watch(), "on_step_end", step=1, lr=0.1)
    assert hook.seen == [(1, 0.1)] * 2


def test_a_mixin_listed_after_hook_raises_an_error_because_it_would_never_run():
    class Mixin:
        def on_step_end(self, step):
            pass

    class Watch(Hook, Mixin):
        pass

    message = registration_error(Watch())
    assert "Mixin.on_step_end would never run" in message
    assert "List Mixin first" in message


# -- the base class requires nothing of its subclasses ---------------------------------------------


def test_a_hook_needs_no_super_init():
    class Watch(Hook):
        def __init__(self, threshold):
            self.threshold = threshold

        def on_step_end(self, loss):
            self.high = loss > self.threshold

    fire(hook := Watch(0.1), "on_step_end", loss=0.5)
    assert hook.high


def test_a_users_attributes_do_not_matter():
    class Watch(Seen):
        def __init__(self):
            super().__init__()
            self.enabled = False
            self.sample_rate = 0.0
            self.every = 1000
            self.from_epoch = 99
            self.name = "another"
            self.schedule = "none of your business"
            self.rank = self._rank = -1
            self.strict = self.status = True
            self.bindings = self.hooks = self.dispatchers = None

        def on_step_end(self, step):
            self.seen.append(step)

    manager = HookManager([hook := Watch()])
    manager.fire("on_step_end", step=1)
    assert hook.seen == [1]
    assert manager.list_hooks() == ["watch"]


# -- arguments are computed only when required, and once -------------------------------------------


class Source:
    """Has the arguments of a step, and counts how often each was computed."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        self.made.append(name)
        return object()


@pytest.mark.parametrize("scheduled_first", [True, False])
def test_an_argument_is_computed_once_for_scheduled_and_optional_parameters(scheduled_first):
    class Due(Source):
        step_in_progress = 2

    class Asks(Seen):
        def on_step_end(self, state):
            self.seen.append(state)

    class Collects(Seen):
        def on_step_end(self, state=None):
            self.seen.append(state)

    manager = HookManager([collects := Collects()])
    manager.add_hook(asks := Asks(), every=2, before="collects" if scheduled_first else None)
    manager.dispatchers.on_step_end(source := Due())
    assert source.made.count("state") == 1
    assert asks.seen[0] is collects.seen[0]


def test_no_argument_is_computed_for_a_hook_that_is_not_due():
    class Costly(Hook):
        def on_step_end(self, state):
            pass

    class Steps(Source):
        step_in_progress = 7

    manager = HookManager()
    manager.add_hook(Costly(), every=10)
    manager.dispatchers.on_step_end(source := Steps())
    assert source.made == []
