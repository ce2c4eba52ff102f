"""Match a hook's methods with events, and their parameters with arguments, at registration.

Whatever does not fit is refused here, with the nearest valid name, so that nothing is silently
skipped at step 40,000.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hookline.errors import SignatureError, nearest
from hookline.events import EVENTS, FLOWS, NAMES, Event
from hookline.hook import Hook

__all__ = ["Binding", "bind"]


@dataclass
class Binding:
    """One method of one hook, ready to be called for one event.

    `positional` and `keywords` say where each argument goes. `collected` (parameter, argument)
    goes in by keyword where the loop supplies it: parameters with a default, and `**kwargs`.
    """

    event: Event
    method: Callable[..., Any]
    label: str
    positional: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    collected: tuple[tuple[str, str], ...] = ()
    asks: frozenset[str] = field(default=frozenset())

    def __post_init__(self) -> None:
        self.asks = frozenset((*self.positional, *(argument for _, argument in self.keywords)))

    @property
    def takes(self) -> frozenset[str]:
        """All arguments it gets where they are known, asked for or with a default."""
        return self.asks | {argument for _, argument in self.collected}


def bind(hook: Hook) -> dict[str, Binding]:
    """Return the hook's bindings by event; raise `SignatureError` for what matches nothing."""
    bindings: dict[str, Binding] = {}
    for name, method in _methods(hook):
        label = f"{type(hook).__name__}.{name}"
        event = _event_of(name, label)
        if event.name in bindings:
            raise SignatureError(
                f"{bindings[event.name].label} and {label} are the same event under two names. "
                f"Keep one of them; '{event.name}' is the name we teach."
            )
        bindings[event.name] = _bind_method(method, event, label)
    if hook.hookline_kind in FLOWS:
        bindings[hook.hookline_kind] = _bind_flow(hook, FLOWS[hook.hookline_kind])
    return bindings


def _bind_flow(hook: Hook, flow: Event) -> Binding:
    """Bind a forward hook's or an update's own call; what carries it comes first."""
    function = hook.hookline_function
    call: Any = function if function is not None else hook.__call__  # type: ignore[operator]
    label = f"{type(hook).__name__}.__call__" if function is None else _name_of(function)
    carrier = "gradients" if flow.name == "update" else "observation"
    asks = _bind_method(call, flow, label)
    if hook.hookline_no_op:
        return asks

    def carried(carrier: Any, *args: Any, **kwargs: Any) -> None:
        carrier.carry(hook, call, args, kwargs)

    return replace(asks, method=carried, positional=(carrier, *asks.positional))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _methods(hook: Hook) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The hook's own public `on_…` methods, wherever in its classes they are written."""
    classes = type(hook).__mro__
    shadowed = classes[classes.index(Hook) + 1 :]
    for name in dir(hook):
        if not name.startswith("on_"):
            continue
        static = inspect.getattr_static(hook, name)
        if static is None:
            continue  # switched off with `on_… = None`
        if static is Hook.__dict__.get(name):
            for mixin in shadowed:
                if name in mixin.__dict__:
                    raise SignatureError(
                        f"{mixin.__name__}.{name} would never run: {type(hook).__name__} inherits "
                        f"from Hook before {mixin.__name__}. Name {mixin.__name__} first."
                    )
            continue  # not overridden
        if isinstance(static, property | cached_property):
            if name in NAMES:
                raise SignatureError(
                    f"{type(hook).__name__}.{name} is a property, but an event needs a method. "
                    "Write it as a method, or call the property something else."
                )
            continue
        method = getattr(hook, name)
        if callable(method):
            yield name, method
        elif name in NAMES:
            raise SignatureError(
                f"{type(hook).__name__}.{name} is a {type(method).__name__}, but an event needs a "
                f"method. Write `def {name}(self, …)`, or call the attribute something else."
            )


def _event_of(name: str, label: str) -> Event:
    if name not in NAMES:
        raise SignatureError(
            f"{label} is no event.{nearest(name, NAMES)} "
            f"Helpers are called something else ('_{name}' is fine). "
            f"The events are: {', '.join(EVENTS)}."
        )
    return EVENTS[NAMES[name]]


def _bind_method(method: Callable[..., Any], event: Event, label: str) -> Binding:
    _refuse_what_a_call_does_not_run(method, label)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"{label} has no signature that Python can show ({error}), so its arguments cannot "
            "be matched. Wrap it in a method that declares its parameters."
        ) from error
    positional: list[str] = []
    keywords: list[tuple[str, str]] = []
    collected: list[tuple[str, str]] = []
    takes_all = False
    for parameter in signature.parameters.values():
        argument = event.parameters.get(parameter.name)
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.VAR_POSITIONAL or (argument is None and has_default):
            continue  # `*args` stays empty; a parameter of the user's own keeps its default
        elif argument is None:
            raise _unknown_parameter(parameter.name, event, label)
        elif has_default and parameter.kind is parameter.POSITIONAL_ONLY:
            raise SignatureError(
                f"{label} takes '{parameter.name}' by position only and with a default, so it can "
                "neither be named nor left out. Drop the `/` or the default."
            )
        elif has_default:
            collected.append((parameter.name, argument))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keywords.append((parameter.name, argument))
        else:
            positional.append(argument)
    if takes_all:
        taken = {*positional, *(a for _, a in keywords), *(a for _, a in collected)}
        collected += [(name, name) for name in event.arguments if name not in taken]
    return Binding(event, method, label, tuple(positional), tuple(keywords), tuple(collected))


def _refuse_what_a_call_does_not_run(method: Callable[..., Any], label: str) -> None:
    """Calling a coroutine or a generator function only makes an object; its body never runs."""
    function = inspect.unwrap(method)
    bodies = (function, inspect.getattr_static(type(function), "__call__"))
    if any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in bodies):
        raise SignatureError(
            f"{label} is a coroutine, and a training loop does not await. Write a plain `def`, "
            "and hand slow work to a thread."
        )
    if any(inspect.isgeneratorfunction(f) for f in bodies):
        raise SignatureError(
            f"{label} contains `yield`, so calling it would run nothing. Write a plain method."
        )


def _unknown_parameter(name: str, event: Event, label: str) -> SignatureError:
    return SignatureError(
        f"{label} asks for '{name}', which {event.name} does not have."
        f"{nearest(name, event.parameters)} It has: {', '.join(event.arguments)}. "
        "A parameter of your own needs a default."
    )
