"""One registered hook: its name, place, schedule, status, failures and cost."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast, get_args

from hookline.arguments import check_choice, show_value
from hookline.dispatch.accounting import CallStats, HookInfo, HookStatus, costs_by_event
from hookline.dispatch.binding import Binding
from hookline.dispatch.settings import Schedule
from hookline.errors import ArgumentError, NameTakenError, RegistrationError
from hookline.events import EVENTS, FLOWS
from hookline.hook import Hook, HookGroup, Ranks
from hookline.masking import mask_secrets, remember_secrets


@dataclass(eq=False)
class Entry:
    """A registered hook. Nothing of this is stored on the hook itself."""

    name: str
    hook: Hook
    bindings: dict[str, Binding]
    schedule: Schedule = field(default_factory=Schedule)
    """When it is called. A built-in that follows `every` itself is called in each step."""

    every: int | None = None
    """As it was registered; None if it was not given."""

    before: str | None = None
    after: str | None = None
    status: HookStatus = "enabled"
    strict: bool = False
    ranks: Ranks = "all"
    is_here: bool = True
    """Whether the hook is called in this process, by its `ranks`."""

    is_default: bool = False
    """Whether the loop registered the hook itself, to be called after all others."""

    failures: int = 0
    last_error: str | None = None
    call_stats: dict[str, CallStats] = field(default_factory=dict)
    failure_streaks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call_stats = {event: CallStats() for event in self.bindings}
        for name in self.hook.secret_options:
            remember_secrets(getattr(self.hook, name, None), is_secret=True)

    def is_clocked(self, event: str) -> bool:
        """Return whether each call is timed, because the hook is slow or has a schedule."""
        stats = self.call_stats[event]
        stats.rare = self.bindings[event].event.per_step and self.schedule != Schedule()
        stats.clocked |= stats.rare
        return stats.clocked

    @property
    def group(self) -> int:
        """The hook's group in the order; forward hooks and updates stay in registration order."""
        if self.is_default:
            return HookGroup.DEFAULT
        is_flow = self.hook.hookline_kind in FLOWS
        return HookGroup.USER if is_flow else type(self.hook).hookline_group

    def registration(self) -> dict[str, Any]:
        """Return the arguments of `add_hook` that register the hook in the same way."""
        place = {"before": self.before, "after": self.after}
        enabled = self.status == "enabled"
        fixed = {"strict": self.strict, "ranks": self.ranks, "enabled": enabled}
        return {**asdict(self.schedule), "every": self.every, **place, **fixed}

    @property
    def enabled(self) -> bool:
        """Whether the hook is called in this process."""
        return self.status == "enabled" and self.is_here

    @property
    def critical(self) -> bool:
        """Whether a failure of the hook stops training."""
        return self.strict or bool(self.hook.critical)

    @property
    def has_state(self) -> bool:
        """Whether one of the hook's other classes has a `state_dict`."""
        return any("state_dict" in vars(cls) for cls in type(self.hook).__mro__ if cls is not Hook)

    def required_arguments(self, event: str) -> list[str]:
        """Return the arguments that the hook's method and its schedule require of an event."""
        binding, schedule = self.bindings[event], self.schedule
        required = sorted(binding.required)
        if binding.event.per_step and (schedule.every > 1 or schedule.sample_rate < 1):
            required.append("step_in_progress")
        if binding.event.per_step and schedule.from_epoch:
            required.append("epoch")
        return required

    def count_failure(self, event: str, call: int) -> int:
        """Count a failure of this call; return how many calls of this event failed in a row."""
        last, streak = self.failure_streaks.get(event, (-1, 0))
        streak = streak + 1 if call == last + 1 else 1
        self.failure_streaks[event] = (call, streak)
        self.failures += 1
        return streak

    def info(self, elapsed: float, earlier: HookInfo | None = None) -> HookInfo:
        """Return the hook's `HookInfo`; `elapsed` is the run's time in seconds.

        The calls and failures of an earlier hook of this name are added.
        """
        costs = costs_by_event(self.call_stats, {} if earlier is None else earlier.costs)
        seconds = sum(cost.seconds for cost in costs.values())
        return HookInfo(
            name=self.name,
            kind=self.hook.hookline_kind,
            cls=_qualified_name(self.hook),
            status=self.status,
            schedule=str(replace(self.schedule, every=self.every or 1)),
            events=tuple(event for event in (*EVENTS, *FLOWS) if event in self.bindings),
            failures=self.failures + (earlier.failures if earlier else 0),
            last_error=self.last_error or (earlier.last_error if earlier else None),
            calls=sum(cost.calls for cost in costs.values()),
            seconds=seconds,
            share=seconds / elapsed if elapsed else 0.0,
            costs=costs,
            options=mask_secrets(dict(self.hook.hookline_options)),
            purpose=(type(self.hook).__doc__ or "").strip().partition("\n")[0],
            cost=type(self.hook).hookline_cost,
            critical=self.critical,
            unmasked_options=dict(self.hook.hookline_options),
        )

    def removed(self, earlier: HookInfo | None) -> HookInfo:
        """Return what the summary keeps after removal, with an earlier removed hook of this name.

        Options may be modules and other large objects, which must not stay alive.
        """
        info = self.info(0.0, earlier)
        return replace(info, status="removed", options={}, unmasked_options={})


def choose_name(hook: Hook, name: str | None, taken: set[str], replace: bool = False) -> str:
    """Return the name of a new hook: as asked for, the hook's own, or one from its class.

    Raises:
        NameTakenError: the name is taken, without `replace`.
    """
    wanted = name if name is not None else hook.hookline_name
    if wanted is not None:
        if not (isinstance(wanted, str) and wanted):
            raise ArgumentError(
                f"A hook's name must be a non-empty string, not {show_value(wanted)}."
            )
        if wanted in taken and not replace:
            raise NameTakenError(
                f"The name '{wanted}' is taken. Choose another with name=…, or pass replace=True."
            )
        return str.__str__(wanted)  # a subclass may have another text
    own = snake_case(_qualified_name(hook).rpartition(".")[2].strip("<>"))
    if type(hook).hookline_group:  # built-ins: ConsoleLogHook is `console_log`
        own = own.removesuffix("_hook")
    if replace or own not in taken:
        return own
    return next(free for i in range(2, len(taken) + 3) if (free := f"{own}_{i}") not in taken)


def choose_ranks(entry: Entry, wanted: Any) -> Ranks:
    """Return in which processes a new hook is called: as asked for, or as its class says."""
    ranks: Any = type(entry.hook).ranks if wanted is None else wanted
    check_choice(f"The ranks of '{entry.name}'", ranks, get_args(Ranks))
    if ranks != "all" and entry.hook.hookline_kind == "update":
        raise RegistrationError(
            f"'{entry.name}' is an update, with ranks='{ranks}': it would change the gradients of "
            "some processes only, which would then train different models. Register it for all."
        )
    return cast("Ranks", ranks)


def _qualified_name(hook: Hook) -> str:
    """Return the path of the hook's class, or of its function."""
    definition: Any = type(hook) if hook.hookline_function is None else hook.hookline_function
    definition = definition if hasattr(definition, "__qualname__") else type(definition)
    return f"{definition.__module__}.{definition.__qualname__}"


def snake_case(name: str) -> str:
    """Return a class name in snake_case: `LRMonitorHook` becomes `lr_monitor_hook`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return words.strip("_").lower()
