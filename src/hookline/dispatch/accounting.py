"""What hooks cost: calls, time and share of the run, from sampled clocks.

Reading a clock takes longer than a small hook does. So one firing in about 250 is timed, at
uneven distances, and what lies between is estimated from it; a hook that turns out slow, or that
a schedule calls rarely, gets a clock at every call, because there it is negligible.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from hookline.dispatch.hook_settings import HookSettings

__all__ = ["HookInfo", "RunClock", "Summary", "Tally", "make_gap"]

log = logging.getLogger("hookline")

SLOW_NS = 20_000  # from here on a clock at every call (about 80 ns) is below half a percent
QUICK_NS = 2_000  # and up to here it would be above four
WINDOW = 512


def make_gap() -> Callable[[int], int]:
    """Return a function that says in how many firings the next timed one comes.

    The first firings are all timed, for events that happen a few times in a run. The generator is
    our own: training's random numbers stay untouched.
    """
    rng = random.Random(0)

    def gap(fired: int) -> int:
        return 1 if fired < 8 else rng.randint(128, 384)

    return gap


@dataclass
class Tally:
    """The calls of one method of one hook, and the time of those that were timed.

    `clocked` says whether each call is timed. A call that took long switches it on; it goes off
    again when, over a while, just one call in the window was slow, as on a busy machine.
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
        """Count one timed call; return True when `clocked` has changed."""
        if not self.clocked and ns < SLOW_NS:
            self.sampled_calls += 1
            self.sampled_ns += ns
            return False
        self.timed_calls += 1  # kept out of the sample, which stands for the untimed calls
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

    def seconds(self, calls: int) -> float:
        """The estimated time of this many calls."""
        untimed = max(0, calls - self.timed_calls - self.sampled_calls)
        mean = self.sampled_ns / self.sampled_calls if self.sampled_calls else 0.0
        return (self.timed_ns + self.sampled_ns + untimed * mean) / 1e9


@dataclass(frozen=True)
class HookInfo:
    """One registered hook, as `describe()` and `summary()` show it."""

    name: str
    kind: str
    cls: str
    enabled: bool
    quarantined: bool
    schedule: str
    events: tuple[str, ...]
    failures: int
    last_error: str | None
    calls: int
    seconds: float
    share: float
    removed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    purpose: str = ""
    cost: str = ""
    critical: bool = False

    @property
    def status(self) -> str:
        """Whether it is enabled, disabled, quarantined or removed."""
        if self.removed:
            return "removed"
        if self.quarantined:
            return "quarantined"
        return "enabled" if self.enabled else "disabled"


@dataclass(frozen=True)
class Summary:
    """What the hooks did and cost so far; `print` shows a table."""

    seconds: float
    hooks: tuple[HookInfo, ...] = field(default=())

    @property
    def share(self) -> float:
        """The share of the run that went into hooks."""
        return sum(hook.share for hook in self.hooks)

    @property
    def failures(self) -> dict[str, int]:
        """The failures by hook, only of those that failed."""
        failures: dict[str, int] = {}
        for hook in self.hooks:
            if hook.failures:
                failures[hook.name] = failures.get(hook.name, 0) + hook.failures
        return failures

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"seconds": self.seconds, "hooks": [asdict(hook) for hook in self.hooks]}

    def __str__(self) -> str:
        rows = [("hook", "calls", "time", "share", "failures", "status")]
        rows += [
            (
                hook.name,
                str(hook.calls),
                f"{hook.seconds:.3f} s",
                f"{hook.share:.1%}",
                str(hook.failures),
                hook.status,
            )
            for hook in self.hooks
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows]
        lines += [
            f"{hook.name}: last error: {hook.last_error}"
            for hook in self.hooks
            if hook.last_error and not hook.critical  # that was raised
        ]
        return "\n".join(line.rstrip() for line in lines)


class RunClock:
    """How long the run has lasted, and whether hooks have taken more of it than their budget."""

    def __init__(self, settings: HookSettings) -> None:
        self._settings = settings
        self._started: float | None = None
        self._ended: float | None = None
        self._next_audit = math.inf

    def start(self) -> None:
        """The run begins now."""
        self._started, self._ended = perf_counter(), None
        if self._settings.budget is not None:
            self._next_audit = self._started + self._settings.budget_after

    def start_unless_running(self) -> None:
        """The run begins now, unless it has begun."""
        if self._started is None:
            self.start()

    def stop(self) -> None:
        """The run ends now."""
        self._ended = perf_counter()

    def elapsed(self) -> float:
        """The run's seconds so far."""
        if self._started is None:
            return 0.0
        return (perf_counter() if self._ended is None else self._ended) - self._started

    def is_audit_due(self) -> bool:
        """Whether it is time to look at the budget: once a second, after a while."""
        return perf_counter() >= self._next_audit

    def audit(self, summary: Summary) -> None:
        """Name the costliest hook, once, if hooks have taken more than their budget."""
        self._next_audit = perf_counter() + 1.0
        budget = self._settings.budget
        if budget is None or summary.share <= budget:
            return
        self._next_audit = math.inf
        costly = max(summary.hooks, key=lambda hook: hook.seconds)
        log.warning(
            "Hooks take %.1f%% of the run, over the budget of %.1f%%. The costliest is '%s' (%s) "
            "with %.1f%%: call it less often (every=…), or make it cheaper.",
            100 * summary.share,
            100 * budget,
            costly.name,
            costly.cls,
            100 * costly.share,
        )
