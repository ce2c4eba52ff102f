"""The arguments of an event that is fired by hand, with `manager.fire(…)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hookline.context import StepContext
from hookline.errors import NotProvidedError, UnknownEventError, nearest
from hookline.events import NAMES, Event, find_event

if TYPE_CHECKING:
    from hookline.dispatch.manager import HookManager

# Loops of small trainers call these events by position; all other arguments are named.
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": ("state",),
    "on_epoch_begin": ("epoch", "state"),
    "on_batch_end": ("batch_idx", "loss", "state"),
    "on_epoch_end": ("epoch", "state"),
    "on_train_end": ("state",),
}


class EventArguments:
    """Has an event's arguments as attributes; takes others from `ctx` or the manager's source."""

    def __init__(self, manager: HookManager, event: Event, arguments: Mapping[str, Any]) -> None:
        self._manager = manager
        self._event = event
        for name, value in arguments.items():
            if name not in event.parameters:
                raise UnknownEventError(
                    f"{event.name} has no argument '{name}'.{nearest(name, event.parameters)} "
                    f"It has: {', '.join(event.arguments)}."
                )
            setattr(self, event.parameters[name], value)

    def __getattr__(self, name: str) -> Any:
        ctx = self.__dict__.get("ctx")
        if isinstance(ctx, StepContext) and name in ctx.__dict__:
            return ctx.lazy_field(name)
        for source in (ctx, self._manager.source):
            value = getattr(source, name, self)
            if value is not self:
                return value
        if name == "step_in_progress":
            return self.step
        methods = self._manager.required_arguments(self._event.name).get(name, ["a schedule"])
        raise NotProvidedError(
            f"{self._event.name} was fired without '{name}', which {', '.join(methods)} asks for. "
            f"Fire it with {name}=…, or give the parameter a default."
        )


def make_event_method(name: str) -> Callable[..., None]:
    """Return the method of a manager that fires this event."""

    def fire_event(self: HookManager, *values: Any, **arguments: Any) -> None:
        self.fire(name, **_name_positional_arguments(name, values), **arguments)

    fire_event.__name__ = name
    fire_event.__doc__ = f"Fire `{NAMES[name]}` by hand, with these arguments."
    return fire_event


def _name_positional_arguments(event: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments by name, for the events that may be called by position."""
    positions = _POSITIONS.get(event, ())
    if len(values) > len(positions):
        first_arguments = list(find_event(event).arguments)[:3]
        raise UnknownEventError(
            f"{event} takes its arguments by name, such as "
            f"{event}({', '.join(f'{argument}=…' for argument in first_arguments)})"
            + (f", or by position {positions}." if positions else ".")
        )
    return dict(zip(positions, values, strict=False))
