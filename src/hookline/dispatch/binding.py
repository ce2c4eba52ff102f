"""Match a hook's methods with events, and their parameters with the events' arguments.

This happens at registration. Anything that does not match raises an error that names the nearest
valid name, so that no method is silently skipped.

Values are plain by default, or as their parameter is annotated: `loss`, `grad_norm` and `lr` are
floats or `LazyFloat`s, paths are strings or `Path`s. In `on_eval_end`, the names of metrics begin
with `eval/`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from hookline.arguments import show_value
from hookline.context import LazyFloat, Metrics
from hookline.errors import SignatureError, nearest
from hookline.events import EVENTS, FLOWS, NAMES, Argument, Event
from hookline.hook import Hook


class WantedValue(NamedTuple):
    """An argument in the form that a parameter wants; without a form, as the loop provides it."""

    argument: str
    form: str = ""

    @property
    def variable(self) -> str:
        """The variable that has the value in generated code."""
        return f"{self.form or 'a'}_{self.argument}"

    @property
    def key(self) -> str:
        """The key of the value among those that were loaded for an event."""
        return self.variable if self.form else self.argument


@dataclass
class Binding:
    """One method of one hook, matched with one event.

    `positional` and `keywords` are the arguments that the method requires. `optional` pairs a
    parameter with its argument, which is passed only where the loop provides it: parameters with
    a default, and `**kwargs`.
    """

    event: Event
    method: Callable[..., Any]
    label: str
    positional: tuple[WantedValue, ...] = ()
    keywords: tuple[tuple[str, WantedValue], ...] = ()
    optional: tuple[tuple[str, WantedValue], ...] = ()

    @property
    def required(self) -> frozenset[str]:
        """The arguments without which the method cannot be called."""
        wanted = (*self.positional, *(value for _, value in self.keywords))
        return frozenset(value.argument for value in wanted)

    @property
    def accepted(self) -> frozenset[str]:
        """All arguments that the method takes, required and optional."""
        return self.required | {value.argument for _, value in self.optional}


def bind(hook: Hook) -> dict[str, Binding]:
    """Return the hook's bindings by event.

    Raises:
        SignatureError: a method matches no event, or a parameter no argument of its event.
    """
    bindings: dict[str, Binding] = {}
    for name, method in _event_methods(hook):
        label = f"{type(hook).__name__}.{name}"
        event = _find_event(name, label)
        if event.name in bindings:
            raise SignatureError(
                f"{bindings[event.name].label} and {label} are the same event under two names. "
                f"Keep one of them, preferably '{event.name}'."
            )
        _check_takes_self(hook, method, event, label)
        bindings[event.name] = _bind_method(method, event, label)
    if hook.hookline_kind in FLOWS:
        bindings[hook.hookline_kind] = _bind_call(hook, FLOWS[hook.hookline_kind])
    return bindings


def _bind_call(hook: Hook, flow: Event) -> Binding:
    """Bind the `__call__` of a forward hook or an update.

    It is not called directly but through the observation or the gradients, which check and keep
    what it does; that object becomes the first argument.
    """
    function = hook.hookline_function
    call: Any = function if function is not None else hook.__call__  # type: ignore[operator]
    label = f"{type(hook).__name__}.__call__"
    if function is not None:
        label = getattr(function, "__qualname__", type(function).__name__)
    carrier = WantedValue("gradients" if flow.name == "update" else "observation")
    if function is None:
        _check_takes_self(hook, call, flow, label)
    binding = _bind_method(call, flow, label)
    if hook.hookline_no_op:
        return binding

    def call_through(carrier: Any, *args: Any, **kwargs: Any) -> None:
        carrier.carry(hook, call, args, kwargs)

    return replace(binding, method=call_through, positional=(carrier, *binding.positional))


def _event_methods(hook: Hook) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the `on_…` methods that the hook's classes, or the instance, define."""
    classes = type(hook).__mro__
    shadowed = classes[classes.index(Hook) + 1 :]
    for name in dir(hook):
        if not name.startswith("on_"):
            continue
        static = inspect.getattr_static(hook, name)
        if static is None:
            continue  # removed by a subclass with `on_… = None`
        if static is Hook.__dict__.get(name):
            for mixin in shadowed:
                if name in mixin.__dict__:
                    raise SignatureError(
                        f"{mixin.__name__}.{name} would never run: {type(hook).__name__} inherits "
                        f"from Hook before {mixin.__name__}. List {mixin.__name__} first."
                    )
            continue  # not overridden
        if isinstance(static, property | cached_property) and name not in NAMES:
            continue
        method = getattr(hook, name)
        if callable(method):
            yield name, method
        elif name in NAMES:
            raise SignatureError(
                f"{type(hook).__name__}.{name} is a {type(method).__name__}, but an event needs a "
                f"method. Write `def {name}(self, …)`, or rename the attribute."
            )


def _find_event(name: str, label: str) -> Event:
    if name not in NAMES:
        raise SignatureError(
            f"{label} is not an event.{nearest(name, NAMES)} "
            f"Give a helper method another name, such as '_{name}'. "
            f"The events are: {', '.join(EVENTS)}."
        )
    return EVENTS[NAMES[name]]


def no_event_text(hook: Hook) -> str:
    """Return a warning about a hook that no event calls; "" for one that may be meant so.

    Those are Hookline's own, hooks that turn off events with `on_… = None`, and hooks with a state
    to save, unless a public method has nearly the name of an event.
    """
    own = [c for c in type(hook).__mro__ if c.__module__.split(".")[0] not in _LIBRARIES]
    methods = {
        name: word
        for class_ in own
        for name, value in vars(class_).items()
        if not name.startswith("_") and callable(value) and (word := _similar_event(name))
    }
    has_state = any("state_dict" in vars(class_) for class_ in own) or "_modules" in vars(hook)
    is_off = any(getattr(hook, name) is None for name in NAMES)
    if not own or ((has_state or is_off) and not methods):
        return ""
    hints = "".join(
        f" If '{name}' is meant to be one, name it '{event}'." for name, event in methods.items()
    )
    return (
        f"{type(hook).__name__} has no method that is an event, so it is never called.{hints} "
        f"The events are: {', '.join(EVENTS)}."
    )


_LIBRARIES = {"builtins", "torch", "hookline"}


def _similar_event(name: str) -> str | None:
    """Return the event whose name a method has, without `on_` or in camelCase or misspelled."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().removeprefix("on_")
    return next(iter(get_close_matches(f"on_{words}", NAMES, n=1, cutoff=0.85)), None)


def _check_takes_self(hook: Hook, method: Any, event: Event, label: str) -> None:
    """Raise for a method whose first parameter is an argument of its event, and not `self`."""
    if not inspect.ismethod(method) or method.__self__ is not hook:
        return
    try:
        parameters = inspect.signature(method.__func__).parameters.values()
    except (TypeError, ValueError):
        return
    first = next(iter(parameters), None)
    if first is None or first.kind is first.KEYWORD_ONLY or first.name in event.parameters:
        raise SignatureError(
            f"{label} has no parameter `self`: its first one is "
            f"{show_value(first.name) if first else 'missing'}. Write `def {label.rsplit('.')[-1]}"
            "(self, …)`."
        )


def _bind_method(method: Callable[..., Any], event: Event, label: str) -> Binding:
    _check_is_plain_function(method, label)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"The signature of {label} cannot be read ({error}), so its arguments cannot "
            "be matched. Wrap it in a method that declares its parameters."
        ) from error
    positional: list[WantedValue] = []
    keywords: list[tuple[str, WantedValue]] = []
    optional: list[tuple[str, WantedValue]] = []
    var_keyword: inspect.Parameter | None = None

    def want(parameter: inspect.Parameter, argument: str) -> WantedValue:
        if argument == "metrics" and label.endswith(".on_eval_end"):
            return WantedValue(argument, "eval")
        return WantedValue(argument, choose_form(event.arguments[argument], parameter, method))

    for parameter in signature.parameters.values():
        argument = event.parameters.get(parameter.name)
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD:
            var_keyword = parameter
        elif parameter.kind is parameter.VAR_POSITIONAL or (argument is None and has_default):
            continue  # `*args` stays empty; a parameter of the user's own keeps its default
        elif argument is None:
            raise _unknown_parameter(parameter.name, event, label)
        elif has_default and parameter.kind is parameter.POSITIONAL_ONLY:
            raise SignatureError(
                f"{label} declares '{parameter.name}' as positional-only with a default, so it can "
                "neither be passed by name nor omitted. Remove the `/` or the default."
            )
        elif has_default:
            optional.append((parameter.name, want(parameter, argument)))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keywords.append((parameter.name, want(parameter, argument)))
        else:
            positional.append(want(parameter, argument))
    binding = Binding(event, method, label, tuple(positional), tuple(keywords), tuple(optional))
    if var_keyword is None:
        return binding
    others = [name for name in event.arguments if name not in binding.accepted]
    return replace(
        binding, optional=(*optional, *((name, want(var_keyword, name)) for name in others))
    )


def _check_is_plain_function(method: Callable[..., Any], label: str) -> None:
    """Raise for a coroutine or generator function: calling it would not run its body."""
    function = inspect.unwrap(method)
    bodies = (function, inspect.getattr_static(type(function), "__call__"))
    if any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in bodies):
        raise SignatureError(
            f"{label} is a coroutine, which a training loop does not await. Use a plain `def`, "
            "and run slow work in a thread."
        )
    if any(inspect.isgeneratorfunction(f) for f in bodies):
        raise SignatureError(
            f"{label} contains `yield`, so calling it would run nothing. Use a plain method."
        )


_OTHER_NAMES = {
    "pl_module": " Lightning's `pl_module` is `model` here; for its `log`, ask for `trainer`.",
    "control": " Instead of Hugging Face's `control`, ask for `trainer` and call trainer.stop(…).",
}


def _unknown_parameter(name: str, event: Event, label: str) -> SignatureError:
    hint = _OTHER_NAMES.get(name) or nearest(name, event.parameters)
    return SignatureError(
        f"{label} asks for '{name}', which {event.name} does not have.{hint} It has: "
        f"{', '.join(event.arguments)}. A parameter of your own needs a default."
    )


# -- the forms of values ---------------------------------------------------------------------------


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "float": lambda value: value if value is None or type(value) is float else float(value),
    "lazy": lambda value: value if value is None or type(value) is LazyFloat else LazyFloat(value),
    "str": lambda value: None if value is None else str(value),
    "path": lambda value: None if value is None else Path(value),
    "eval": lambda value: Metrics.for_eval(value) if type(value) is Metrics else value,
}
"""The functions that convert a value, by form."""

_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}


def choose_form(argument: Argument, parameter: inspect.Parameter, method: Any) -> str:
    """Return the form in which a parameter of a method wants an argument."""
    if not argument.form:
        return ""
    if parameter.kind is parameter.VAR_KEYWORD:
        return "lazy" if argument.form == "float" else argument.form
    names = _type_names(parameter.annotation, _namespace(method))
    if argument.form == "float" and "LazyFloat" in names:
        return "lazy"
    if argument.form == "str" and names & _PATHS and "str" not in names:
        return "path"
    return argument.form


def _namespace(method: Any) -> dict[str, Any]:
    """Return the globals in which a method's annotations are written."""
    function = inspect.unwrap(method)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__globals__"):
        function = inspect.unwrap(type(function).__call__)
    return getattr(function, "__globals__", {})


def _type_names(annotation: Any, namespace: dict[str, Any]) -> set[str]:
    """Return the names of the types in an annotation, also in `Optional` and in strings."""
    if isinstance(annotation, str):
        with suppress(Exception):  # such as a name that is imported under TYPE_CHECKING
            annotation = eval(annotation, namespace)
    return set(re.findall(r"\w+", annotation if isinstance(annotation, str) else repr(annotation)))
