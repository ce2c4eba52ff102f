"""The cost of hooks: calls, time and share of the run, from sampled clocks.

Reading a clock takes longer than a small hook does. So about one event in 250 is timed, at random
intervals, and the time of the other calls is estimated from it. Slow hooks and hooks with a
schedule are timed at every call, where the clock's own cost is negligible.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Literal, NamedTuple

from hookline.dispatch.settings import HookSettings
from hookline.printable import quote_lines
from hookline.text_tables import format_table

log = logging.getLogger("hookline")

SLOW_NS = 20_000  # above this, timing every call (about 80 ns) costs less than half a percent
QUICK_NS = 2_000  # below this, it would cost more than four percent
WINDOW = 512

# Hooks are compared with their budget after so many steps, not counting the first ones. The step is
# not asked for in the first second: only hooks ask for arguments in a run that is shorter.
WARM_UP_SECONDS = 1.0
WARM_UP_STEPS = 5
BUDGET_STEPS = 100

HookStatus = Literal["enabled", "disabled", "failed", "removed"]
"""`failed`: disabled after repeated failures, or because the loop does not provide an argument."""


def costs_by_event(
    call_stats: Mapping[str, CallStats], earlier: Mapping[str, EventCost]
) -> dict[str, EventCost]:
    """Return what was called so far, added to what an earlier hook of the same name has cost."""
    costs = dict(earlier)
    for event, stats in call_stats.items():
        if stats.calls:
            before = costs.get(event, EventCost(0, 0.0))
            costs[event] = EventCost(before.calls + stats.calls, before.seconds + stats.seconds)
    return costs


@dataclass
class CallStats:
    """The calls of one method of one hook, and the time of those that were timed.

    With `clocked`, every call is timed. A slow call turns it on; it is turned off again when at
    most one call of a whole window was slow, as happens on a busy machine.
    """

    calls: int = 0
    timed_calls: int = 0
    timed_ns: int = 0
    sampled_calls: int = 0
    sampled_ns: int = 0
    clocked: bool = False
    rare: bool = False
    _window: list[int] = field(default_factory=list[int])

    def add(self, ns: int) -> bool:
        """Add one timed call; return whether `clocked` has changed."""
        if not self.clocked and ns < SLOW_NS:
            self.sampled_calls += 1
            self.sampled_ns += ns
            return False
        self.timed_calls += 1  # not part of the sample, which estimates the untimed calls
        self.timed_ns += ns
        if not self.clocked:
            self.clocked = True
            return True
        if self.rare:
            return False
        self._window.append(ns)
        if len(self._window) < WINDOW:
            return False
        quick = [ns for ns in self._window if ns < SLOW_NS]
        self._window.clear()
        self.clocked = len(quick) < WINDOW - 1 or sum(quick) > QUICK_NS * len(quick)
        return not self.clocked

    @property
    def seconds(self) -> float:
        """The estimated time of all calls."""
        untimed = max(0, self.calls - self.timed_calls - self.sampled_calls)
        mean = self.sampled_ns / self.sampled_calls if self.sampled_calls else 0.0
        return (self.timed_ns + self.sampled_ns + untimed * mean) / 1e9


class EventCost(NamedTuple):
    """How often a hook was called for an event, and how long that took."""

    calls: int
    seconds: float


@dataclass(frozen=True)
class HookInfo:
    """One registered hook, as `describe()` and `summary()` show it."""

    name: str
    kind: str
    cls: str
    status: HookStatus
    schedule: str
    events: tuple[str, ...]
    failures: int
    last_error: str | None
    calls: int
    seconds: float
    share: float
    costs: Mapping[str, EventCost] = field(default_factory=dict[str, "EventCost"])
    """The calls and their time by event; by method, for calls that are not events."""

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    purpose: str = ""
    cost: str = ""
    critical: bool = False
    unmasked_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """The options with their secrets, for the configuration hash; never recorded or shown."""

    @property
    def enabled(self) -> bool:
        """Whether the hook is called."""
        return self.status == "enabled"


@dataclass(frozen=True)
class Summary:
    """The calls, failures and cost of hooks so far; `print` shows a table."""

    seconds: float
    hooks: tuple[HookInfo, ...] = field(default=())
    other_ranks: tuple[Summary, ...] = field(default=())
    """The summaries of ranks 1, 2, …, after a run of several processes that has ended well."""

    @property
    def share(self) -> float:
        """The share of the run that was spent in hooks."""
        return sum(hook.share for hook in self.hooks)

    @property
    def failures(self) -> dict[str, int]:
        """The number of failures by hook name, only of hooks that failed."""
        failures = Counter[str]()
        for hook in self.hooks:
            failures[hook.name] += hook.failures
        return {name: count for name, count in failures.items() if count}

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as a dict; options of hooks are not copied."""
        names = [one.name for one in fields(HookInfo) if one.name != "unmasked_options"]
        hooks = [{name: getattr(hook, name) for name in names} for hook in self.hooks]
        for hook in hooks:
            hook["costs"] = {event: cost._asdict() for event, cost in hook["costs"].items()}
        summary = {"seconds": self.seconds, "hooks": hooks}
        if self.other_ranks:
            ranks = enumerate(self.other_ranks, 1)
            summary["other_ranks"] = [
                {"rank": n, "hooks": one.describe_costs()} for n, one in ranks
            ]
        return summary

    def describe_costs(self) -> list[dict[str, Any]]:
        """Return what differs between the ranks, of the hooks that were called."""
        names = ("name", "status", "calls", "seconds", "share", "failures", "last_error")
        called = [hook for hook in self.hooks if hook.calls or hook.failures]
        return [{name: getattr(hook, name) for name in names} for hook in called]

    def __str__(self) -> str:
        headers = ("hook", "calls", "time", "share", "failures", "status")
        rows = [
            (
                h.name,
                f"{h.calls}",
                f"{h.seconds:.3f} s",
                f"{h.share:.1%}",
                f"{h.failures}",
                h.status,
            )
            for h in self.hooks
        ]
        lines = [format_table(headers, rows)]
        lines += [
            f"{hook.name}: last error: {quote_lines(hook.last_error)}"
            for hook in self.hooks
            if hook.last_error and not hook.critical  # a critical hook's error was raised
        ]
        for rank, other in enumerate(self.other_ranks, 1):
            lines += [
                f"rank {rank}: {hook.name} failed {hook.failures} times, last error: "
                f"{quote_lines(hook.last_error or '')}"
                for hook in other.hooks
                if hook.failures
            ]
        if self.other_ranks:
            shares = [self.share, *(other.share for other in self.other_ranks)]
            rank = shares.index(max(shares))
            lines.append(f"{len(shares)} ranks; hooks cost most in rank {rank}: {max(shares):.1%}")
        return "\n".join(lines)


class RunClock:
    """Measures the run, chooses the events that are timed, and checks the budget of hooks."""

    def __init__(self, settings: HookSettings) -> None:
        self._settings = settings
        self._started: float | None = None
        self._ended: float | None = None
        self._earlier = 0.0  # seconds of the runs before, whose calls are counted too
        self._next_check = math.inf
        self._first_step: int | None = None
        self._after_warm_up: tuple[int, Summary] | None = None
        self._random = random.Random(0)  # training's random numbers are not consumed

    def start(self) -> None:
        """Start the clock, or continue it in another run."""
        if self._ended is not None:
            self._earlier = self.elapsed()
        self._started, self._ended = perf_counter(), None
        self._first_step = self._after_warm_up = None
        if self._settings.budget is not None:
            self._next_check = self._started + WARM_UP_SECONDS

    def start_unless_running(self) -> None:
        """Start the clock, unless it was started before."""
        if self._started is None:
            self.start()

    def stop(self) -> None:
        """Stop the clock."""
        if self._started is not None and self._ended is None:
            self._ended = perf_counter()

    def elapsed(self) -> float:
        """Return the seconds of all runs, from start until now or until the stop."""
        if self._started is None:
            return 0.0
        ended = perf_counter() if self._ended is None else self._ended
        return self._earlier + ended - self._started

    def next_gap(self, fired: int) -> int:
        """Return after how many events the next one is timed, of an event that was fired so often.

        The first eight are all timed, because some events happen only a few times in a run.
        """
        return 1 if fired < 8 else self._random.randint(128, 384)

    def check_budget(
        self, read_step: Callable[[], int | None], summarize: Callable[[], Summary]
    ) -> None:
        """Warn once, naming the costliest hook, if hooks exceed their budget.

        The first steps are left out: compilation, imports and allocation are not representative.
        The budget is looked at when `budget_after` seconds and enough steps have passed since, and
        then once a second.
        """
        if perf_counter() < self._next_check or (step := read_step()) is None:
            return
        if self._first_step is None:
            self._first_step = step
        if self._after_warm_up is None:
            if step - self._first_step >= WARM_UP_STEPS:
                self._after_warm_up = step, summarize()
                self._next_check = perf_counter() + self._settings.budget_after
        elif step - self._after_warm_up[0] >= BUDGET_STEPS:
            self._next_check = perf_counter() + 1.0
            self._compare_with_budget(self._after_warm_up[1], summarize())

    def _compare_with_budget(self, before: Summary, summary: Summary) -> None:
        spent = defaultdict[tuple[str, str], float](float)
        for hook in summary.hooks:
            spent[hook.name, hook.cls] += hook.seconds
        for hook in before.hooks:
            spent[hook.name, hook.cls] -= hook.seconds
        seconds, budget = summary.seconds - before.seconds, self._settings.budget
        total = sum(spent.values())
        if budget is None or total <= budget * seconds:
            return
        self._next_check = math.inf
        ((name, cls), most) = max(spent.items(), key=lambda item: item[1])
        log.warning(
            "Hooks take %.1f%% of the run, over the budget of %.1f%%. The costliest is '%s' (%s) "
            "with %.1f%%: call it less often (`hookline.every(100, hook)` in a list of hooks, "
            "`every: 100` beside its name in a config file), or make it cheaper.",
            100 * total / seconds,
            100 * budget,
            name,
            cls,
            100 * most / seconds,
        )
