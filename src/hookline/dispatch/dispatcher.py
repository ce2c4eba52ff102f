"""The compiled dispatcher of one event: the generated function and the names it stands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from types import FunctionType
from typing import Any, Protocol

from hookline.dispatch.compiler import dispatcher_code, shape_of
from hookline.dispatch.entry import Entry
from hookline.errors import NotSuppliedError

__all__ = ["Dispatcher"]


class Owner(Protocol):
    """What a dispatcher needs of the manager."""

    def hook_failed(
        self, entry: Entry, event: str, call: int, error: Exception
    ) -> Exception | None: ...
    def calls_of(self, entry: Entry, event: str) -> int: ...
    def hook_misses(
        self, entries: Sequence[Entry], event: str, src: object, error: NotSuppliedError
    ) -> Exception | None: ...
    def resume_dispatch(self, event: str, src: object) -> None: ...
    def next_sample(self, fired: int) -> int: ...
    def needs_clock(self, event: str) -> None: ...


class Dispatcher:
    """Calls the given hooks for one event; `function(src)` fires it."""

    def __init__(self, owner: Owner, event: str, entries: Sequence[Entry], fired: int) -> None:
        self.owner = owner
        self.event = event
        self.entries = tuple(entries)
        self.fired_before = fired
        self._folded = [0] * len(self.entries)
        self._scheduled: list[bool] = []
        self._names: dict[str, Any] = {
            "left": 0,  # firings until the next timed one
            "gap": self._gap,
            "failed": self._failed,
            "spent": self._spent,
            "clock": perf_counter_ns,
            "collect": _collect,
            "UNSET": object(),
            "NotSupplied": NotSuppliedError,
            "missing": self._missing,
            "misses": self._misses,
            "first": _first,
        }
        self._armed = 0  # firings up to the next timed one
        self._names["left"] = self._gap()
        self.function: FunctionType = self._build()

    def _build(self) -> Any:
        shapes = []
        for i, entry in enumerate(self.entries):
            binding, schedule = entry.bindings[self.event], entry.schedule
            shape = shape_of(binding, schedule, clocked=entry.is_clocked(self.event))
            shapes.append(shape)
            self._scheduled.append(shape.scheduled)
            self._names |= {
                f"h{i}": binding.method,
                f"c{i}": binding.collected,
                f"n{i}": 0,
                f"every{i}": schedule.every,
                f"from_epoch{i}": schedule.from_epoch,
                f"samples{i}": _sampler(entry),
            }
        exec(dispatcher_code(self.event, tuple(shapes)), self._names)
        return self._names["dispatch"]

    @property
    def fired(self) -> int:
        """How often the event was fired while this dispatcher was there."""
        return self._armed - int(self._names["left"])

    def blank(self, entry: Entry) -> None:
        """Do not call this hook any more, not even in a firing that has begun."""
        if entry not in self.entries:
            return
        i = self.entries.index(entry)
        tally = entry.tallies[self.event]

        def nothing(*args: Any, **kwargs: Any) -> None:
            """Stand where the hook was; its call in the firing that has begun was counted."""
            tally.calls -= 1

        self._names[f"h{i}"] = nothing

    def calls(self, i: int) -> int:
        """How often this dispatcher called its i-th hook."""
        return int(self._names[f"n{i}"]) if self._scheduled[i] else self.fired

    def __del__(self) -> None:
        self.fold()  # a firing may have gone on after the last look

    def fold(self) -> None:
        """Move the calls counted here into the hooks' accounts."""
        for i, entry in enumerate(self.entries):
            calls = self.calls(i)
            entry.tallies[self.event].calls += calls - self._folded[i]
            self._folded[i] = calls

    def _gap(self) -> int:
        """Say in how many firings the next timed one comes; called in the timed ones."""
        gap = self.owner.next_sample(self.fired_before + self._armed)
        self._armed += gap
        return gap

    def _failed(self, i: int, error: Exception) -> Exception | None:
        entry = self.entries[i]
        call = self.owner.calls_of(entry, self.event)
        return self.owner.hook_failed(entry, self.event, call, error)

    def _missing(self, src: object, error: NotSuppliedError) -> None:
        """Nobody has been called yet: go on with those that have what they ask for."""
        fatal = self.owner.hook_misses(self.entries, self.event, src, error)
        self.owner.resume_dispatch(self.event, src)
        if fatal is not None:
            raise fatal

    def _misses(self, i: int, src: object, error: NotSuppliedError) -> Exception | None:
        return self.owner.hook_misses([self.entries[i]], self.event, src, error)

    def _spent(self, i: int, ns: int) -> None:
        if self.entries[i].tallies[self.event].add(ns):
            self.owner.needs_clock(self.event)


def _sampler(entry: Entry) -> Callable[[int], bool]:
    def samples(step: int) -> bool:
        return entry.schedule.samples(entry.name, step)

    return samples


def _collect(src: Any, wanted: tuple[tuple[str, str], ...], made: dict[str, Any]) -> dict[str, Any]:
    """The arguments that go in by keyword, where the loop has them; each is made once an event."""
    collected = {}
    for parameter, argument in wanted:
        try:
            if argument not in made:
                made[argument] = getattr(src, argument)
        except NotSuppliedError:  # a default takes its place, and `**kwargs` does without
            continue
        collected[parameter] = made[argument]
    return collected


def _first(one: Exception | None, other: Exception | None) -> Exception | None:
    """The error to raise, with a note of a second one."""
    if one is not None and other is not None:
        one.add_note(str(other))
    return other if one is None else one
