"""Match a hook's methods with events, and their parameters with the events' arguments.

This happens at registration. Anything that does not match raises an error that names the nearest
valid name, so that no method is silently skipped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hookline.errors import SignatureError, nearest
from hookline.events import EVENTS, FLOWS, NAMES, Event
from hookline.hook import Hook

__all__ = ["Binding", "bind"]


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
    positional: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    optional: tuple[tuple[str, str], ...] = ()

    @property
    def required(self) -> frozenset[str]:
        """The arguments without which the method cannot be called."""
        return frozenset((*self.positional, *(argument for _, argument in self.keywords)))

    @property
    def accepted(self) -> frozenset[str]:
        """All arguments that the method takes, required and optional."""
        return self.required | {argument for _, argument in self.optional}


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
    carrier = "gradients" if flow.name == "update" else "observation"
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
        if isinstance(static, property | cached_property):
            if name in NAMES:
                raise SignatureError(
                    f"{type(hook).__name__}.{name} is a property, but an event needs a method. "
                    "Make it a method, or rename the property."
                )
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


def _bind_method(method: Callable[..., Any], event: Event, label: str) -> Binding:
    _check_is_plain_function(method, label)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"The signature of {label} cannot be read ({error}), so its arguments cannot "
            "be matched. Wrap it in a method that declares its parameters."
        ) from error
    positional: list[str] = []
    keywords: list[tuple[str, str]] = []
    optional: list[tuple[str, str]] = []
    has_var_keyword = False
    for parameter in signature.parameters.values():
        argument = event.parameters.get(parameter.name)
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD:
            has_var_keyword = True
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
            optional.append((parameter.name, argument))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keywords.append((parameter.name, argument))
        else:
            positional.append(argument)
    if has_var_keyword:
        bound = {*positional, *(a for _, a in keywords), *(a for _, a in optional)}
        optional += [(name, name) for name in event.arguments if name not in bound]
    return Binding(event, method, label, tuple(positional), tuple(keywords), tuple(optional))


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


def _unknown_parameter(name: str, event: Event, label: str) -> SignatureError:
    return SignatureError(
        f"{label} asks for '{name}', which {event.name} does not have."
        f"{nearest(name, event.parameters)} It has: {', '.join(event.arguments)}. "
        "A parameter of your own needs a default."
    )
