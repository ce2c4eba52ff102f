"""Where the arguments of an event come from when it is fired by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.context import StepContext
from hookline.errors import NotSuppliedError, UnknownEventError, nearest
from hookline.events import Event, find_event

if TYPE_CHECKING:
    from hookline.dispatch.manager import HookManager

__all__ = ["Given", "given_by_position"]

# A small trainer's loop calls its manager by position; elsewhere arguments go by name.
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    "on_train_begin": ("state",),
    "on_epoch_begin": ("epoch", "state"),
    "on_batch_end": ("batch_idx", "loss", "state"),
    "on_epoch_end": ("epoch", "state"),
    "on_train_end": ("state",),
}


class Given:
    """The arguments given to `fire`; asks the manager's source for the others."""

    def __init__(self, manager: HookManager, event: Event, given: Mapping[str, Any]) -> None:
        self._manager = manager
        self._event = event
        for name, value in given.items():
            if name not in event.parameters:
                raise UnknownEventError(
                    f"{event.name} has no argument '{name}'.{nearest(name, event.parameters)} "
                    f"It has: {', '.join(event.arguments)}."
                )
            setattr(self, event.parameters[name], value)

    def __getattr__(self, name: str) -> Any:
        ctx = self.__dict__.get("ctx")
        if isinstance(ctx, StepContext) and name in ctx.__dict__:
            return ctx.unread(name)
        for source in (ctx, self._manager.source):
            value = getattr(source, name, self)
            if value is not self:
                return value
        if name == "step_in_progress":
            return self.step
        asking = self._manager.wanted(self._event.name).get(name, ["a schedule"])
        raise NotSuppliedError(
            f"{self._event.name} was fired without '{name}', which {', '.join(asking)} asks for. "
            f"Fire it with {name}=…, or give the parameter a default."
        )


def given_by_position(name: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments by name, for the events that take any."""
    positions = _POSITIONS.get(name, ())
    if len(values) > len(positions):
        event = find_event(name)
        raise UnknownEventError(
            f"{name} takes its arguments by name, such as "
            f"{name}({', '.join(f'{argument}=…' for argument in list(event.arguments)[:3])})"
            + (f", or by position {positions}." if positions else ".")
        )
    return dict(zip(positions, values, strict=False))
