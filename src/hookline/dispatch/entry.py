"""One hook as it is registered: its name, place, schedule, toggle, failures and account."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from hookline.dispatch.accounting import HookInfo, Tally
from hookline.dispatch.binding import Binding
from hookline.dispatch.schedule import Schedule
from hookline.errors import NameTakenError
from hookline.events import EVENTS, FLOWS
from hookline.hook import Hook, Rank

__all__ = ["Entry", "RemovedEntry", "free_name"]


@dataclass(eq=False)
class Entry:
    """What the manager knows of a hook. The hook itself knows nothing of it."""

    name: str
    hook: Hook
    bindings: dict[str, Binding]
    schedule: Schedule = field(default_factory=Schedule)
    before: str | None = None
    after: str | None = None
    enabled: bool = True
    strict: bool = False
    quarantined: bool = False
    failures: int = 0
    last_error: str | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)
    streaks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tallies = {event: Tally() for event in self.bindings}

    def is_clocked(self, event: str) -> bool:
        """Whether each call is timed: a scheduled hook is called rarely, a slow one is slow."""
        tally = self.tallies[event]
        tally.rare = self.bindings[event].event.per_step and self.schedule != Schedule()
        tally.clocked |= tally.rare
        return tally.clocked

    @property
    def rank(self) -> int:
        """Users' hooks come before built-ins; what is in a flow, in the order it was added."""
        rank = type(self.hook).hookline_rank
        in_flow = self.hook.hookline_kind in FLOWS and rank is not Rank.DEFAULT
        return Rank.USER if in_flow else rank

    @property
    def active(self) -> bool:
        """Whether it is called."""
        return self.enabled and not self.quarantined

    @property
    def critical(self) -> bool:
        """Whether training depends on it."""
        return self.strict or bool(self.hook.critical)

    @property
    def saves(self) -> bool:
        """Whether the hook keeps a state of its own."""
        return type(self.hook).state_dict is not Hook.state_dict

    def asks(self, event: str) -> list[str]:
        """What this hook needs of the loop when the event is fired, for its schedule too."""
        binding, schedule = self.bindings[event], self.schedule
        asks = sorted(binding.asks)
        if binding.event.per_step and (schedule.every > 1 or schedule.sample_rate < 1):
            asks.append("step_in_progress")
        if binding.event.per_step and schedule.from_epoch:
            asks.append("epoch")
        return asks

    def count_failure(self, event: str, call: int) -> int:
        """Count a failure of this call; return how many calls of this event failed in a row."""
        last, streak = self.streaks.get(event, (-1, 0))
        streak = streak + 1 if call == last + 1 else 1
        self.streaks[event] = (call, streak)
        self.failures += 1
        return streak

    def info(self, elapsed: float) -> HookInfo:
        """Return it as `describe()` shows it; `elapsed` are the run's seconds."""
        seconds = sum(tally.seconds(tally.calls) for tally in self.tallies.values())
        return HookInfo(
            name=self.name,
            kind=self.hook.hookline_kind,
            cls=_origin(self.hook),
            enabled=self.enabled,
            quarantined=self.quarantined,
            schedule=str(self.schedule),
            events=tuple(event for event in (*EVENTS, *FLOWS) if event in self.bindings),
            failures=self.failures,
            last_error=self.last_error,
            calls=sum(tally.calls for tally in self.tallies.values()),
            seconds=seconds,
            share=seconds / elapsed if elapsed else 0.0,
            options=dict(self.hook.hookline_options),
            purpose=(type(self.hook).__doc__ or "").strip().partition("\n")[0],
            cost=type(self.hook).hookline_cost,
            critical=self.critical,
        )

    def gone(self, before: RemovedEntry | None) -> RemovedEntry:
        """Return what remains of it when it is removed; `before` had its name and went earlier."""
        return RemovedEntry(
            self.info(0.0), self.tallies, before.info(0.0) if before is not None else None
        )


@dataclass(frozen=True)
class RemovedEntry:
    """The account of a removed hook, without the hook. A firing that has begun still counts."""

    last: HookInfo
    tallies: dict[str, Tally]
    before: HookInfo | None

    def info(self, elapsed: float) -> HookInfo:
        """Return it as `summary()` shows it, with what hooks of this name did before it."""
        calls = sum(tally.calls for tally in self.tallies.values())
        seconds = sum(tally.seconds(tally.calls) for tally in self.tallies.values())
        failures, last_error = self.last.failures, self.last.last_error
        if self.before is not None:
            calls += self.before.calls
            seconds += self.before.seconds
            failures += self.before.failures
            last_error = last_error or self.before.last_error
        return replace(
            self.last,
            removed=True,
            calls=calls,
            seconds=seconds,
            share=seconds / elapsed if elapsed else 0.0,
            failures=failures,
            last_error=last_error,
        )


def free_name(hook: Hook, name: str | None, taken: set[str], replace: bool = False) -> str:
    """Return the name for a new hook: the given one, if it is free, or one from its class."""
    given = name if name is not None else hook.hookline_name
    if given is not None:
        if not (isinstance(given, str) and given):
            raise ValueError(f"A hook's name is a word, not {given!r}.")
        if given in taken and not replace:
            raise NameTakenError(
                f"The name '{given}' is taken. Give another with name=…, or say replace=True."
            )
        return given
    automatic = snake_case(_origin(hook).rpartition(".")[2].strip("<>"))
    if type(hook).hookline_rank:  # built-ins: ConsoleLogHook is `console_log`
        automatic = automatic.removesuffix("_hook")
    if replace or automatic not in taken:
        return automatic
    return next(free for i in range(2, len(taken) + 3) if (free := f"{automatic}_{i}") not in taken)


def _origin(hook: Hook) -> str:
    """Where a hook was written: the path of its class, or of its function."""
    what: Any = type(hook) if hook.hookline_function is None else hook.hookline_function
    what = what if hasattr(what, "__qualname__") else type(what)
    return f"{what.__module__}.{what.__qualname__}"


def snake_case(name: str) -> str:
    """Return a class name as a hook's name: `LRMonitorHook` becomes `lr_monitor_hook`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return words.strip("_").lower()
