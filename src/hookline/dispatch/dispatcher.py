"""The compiled dispatchers of a manager's events."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from hookline.dispatch.accounting import RunClock
from hookline.dispatch.binding import CONVERSIONS, WantedValue
from hookline.dispatch.compiler import (
    CallSignature,
    always_loaded,
    make_signature,
    make_source,
    register_source,
)
from hookline.dispatch.entry import Entry
from hookline.errors import NotProvidedError
from hookline.events import EVENTS, FLOWS

if TYPE_CHECKING:
    from hookline.dispatch.manager import HookManager


class Dispatchers:
    """For each event, the function to call with the event context; None if no hook listens."""

    __slots__ = (*EVENTS, *FLOWS)

    def __init__(self) -> None:
        for event in self.__slots__:
            setattr(self, event, None)


class DispatcherTable:
    """Compiles dispatchers when their events are first fired, and counts calls."""

    def __init__(self, manager: HookManager, lock: threading.RLock, clock: RunClock) -> None:
        self.manager, self.clock = manager, clock
        self.dispatchers: Any = Dispatchers()
        self._lock = lock
        self._compiled: dict[str, Dispatcher] = {}
        self._in_use: dict[str, WeakSet[Dispatcher]] = {
            event: WeakSet() for event in Dispatchers.__slots__
        }

    def invalidate(self, event: str) -> None:
        """Replace an event's dispatcher by a stub that compiles a new one when fired.

        Compiling late keeps registering n hooks from compiling n dispatchers of up to n calls.
        """
        with self._lock:
            old = self._compiled.pop(event, None)
            if old is not None:
                old.update_counts()
            stub = partial(self._compile_and_fire, event) if self.manager.listening(event) else None
            setattr(self.dispatchers, event, stub)

    def silence(self, lock: threading.RLock) -> None:
        """Call no hook for any event, and use another lock from now on."""
        self._lock = lock
        self._compiled.clear()
        for event in Dispatchers.__slots__:
            setattr(self.dispatchers, event, None)

    def deactivate(self, entry: Entry) -> None:
        """Stop calling a hook at once, also in events that are being fired."""
        for event in entry.bindings:
            for dispatcher in self._in_use[event]:
                dispatcher.deactivate(entry)

    def update_counts(self) -> None:
        """Add the calls counted by all dispatchers to the hooks' stats."""
        for dispatchers in self._in_use.values():
            for dispatcher in dispatchers:
                dispatcher.update_counts()

    def count_calls(self, entry: Entry, event: str) -> int:
        """Return how often a hook was called for an event."""
        with self._lock:
            for dispatcher in self._in_use[event]:
                dispatcher.update_counts()
            return entry.call_stats[event].calls

    def _compile_and_fire(self, event: str, context: object) -> None:
        with self._lock:
            if event not in self._compiled:
                entries = self.manager.listening(event)
                if not entries:
                    return  # another thread removed the last one after the stub was looked up
                dispatcher = self.make(event, entries)
                self._compiled[event] = dispatcher
                setattr(self.dispatchers, event, dispatcher.function)
            self.clock.start_unless_running()
            function = self._compiled[event].function
        function(context)

    def make(self, event: str, entries: Sequence[Entry]) -> Dispatcher:
        """Return a dispatcher whose calls are counted, and in which hooks can be deactivated."""
        dispatcher = Dispatcher(self, event, entries)
        self._in_use[event].add(dispatcher)
        return dispatcher


class Dispatcher:
    """Calls hooks for one event; `function(context)` fires it."""

    def __init__(self, table: DispatcherTable, event: str, entries: Sequence[Entry]) -> None:
        self.table = table
        self.event = event
        self.entries = tuple(entries)
        self._counted = [0] * len(self.entries)
        self._signatures: list[CallSignature] = []
        self._globals: dict[str, Any] = {
            "until_timed": 0,  # events until the next timed one
            "next_gap": self._next_gap,
            "handle_failure": self._handle_failure,
            "add_time": self._add_time,
            "clock": perf_counter_ns,
            "load_optional": _load_optional,
            "UNSET": object(),
            "NotProvided": NotProvidedError,
            "skip_and_retry": self._skip_and_retry,
            "fail_and_retry": self._fail_and_retry,
            "handle_missing_args": self._handle_missing_args,
            "first_error": _first_error,
            **{f"to_{form}": convert for form, convert in CONVERSIONS.items()},
        }
        self._next_timed = 0  # the number of the next timed event
        self._globals["until_timed"] = self._next_gap()
        self.function: FunctionType = self._compile()

    def _compile(self) -> Any:
        for i, entry in enumerate(self.entries):
            binding, schedule = entry.bindings[self.event], entry.schedule
            signature = make_signature(binding, schedule, clocked=entry.is_clocked(self.event))
            self._signatures.append(signature)
            self._globals |= {
                f"hook{i}": binding.method,
                f"optional{i}": binding.optional,
                f"calls{i}": 0,
                f"every{i}": schedule.every,
                f"from_epoch{i}": schedule.from_epoch,
                f"samples{i}": partial(schedule.samples, entry.name),
            }
        labels = [f"{entry.name!r} ({entry.bindings[self.event].label})" for entry in self.entries]
        source = make_source(tuple(self._signatures))
        exec(register_source(source, self.event, labels, owner=self), self._globals)
        return self._globals["dispatch"]

    @property
    def fired(self) -> int:
        """How often this dispatcher was called."""
        return self._next_timed - int(self._globals["until_timed"])

    def deactivate(self, entry: Entry) -> None:
        """Stop calling this hook, also in an event that is being fired."""
        if entry not in self.entries:
            return
        stats = entry.call_stats[self.event]

        def skip(*args: Any, **kwargs: Any) -> None:
            """Take back the count of the call that this replaces."""
            stats.calls -= 1

        self._globals[f"hook{self.entries.index(entry)}"] = skip

    def __del__(self) -> None:
        if hasattr(self, "function"):  # else it was not completed
            self.update_counts()  # an event may have been in progress at the last update

    def update_counts(self) -> None:
        """Add the calls since the last update to the hooks' stats."""
        for i, entry in enumerate(self.entries):
            calls = int(self._globals[f"calls{i}"]) if self._signatures[i].scheduled else self.fired
            entry.call_stats[self.event].calls += calls - self._counted[i]
            self._counted[i] = calls

    def _next_gap(self, context: object = None) -> int:
        """Return after how many events the next one is timed; called by the timed ones."""
        clock = self.table.clock
        clock.check_budget(partial(_step_of, context), self.table.manager.summary)
        gap = clock.next_gap(self._next_timed)
        self._next_timed += gap
        return gap

    def _handle_failure(self, i: int, error: Exception) -> Exception | None:
        entry = self.entries[i]
        call = self.table.count_calls(entry, self.event)
        return self.table.manager.handle_failure(entry, self.event, call, error)

    def _skip_and_retry(self, context: object, error: NotProvidedError) -> None:
        """Disable the hooks that lack an argument, then call the others: none was called yet."""
        manager = self.table.manager
        fatal = manager.handle_missing_args(self.entries, self.event, context, error)
        dispatch = getattr(self.table.dispatchers, self.event)
        if dispatch is not None:
            dispatch(context)
        if fatal is not None:
            raise fatal

    def _fail_and_retry(self, context: object, error: Exception) -> None:
        """Fail the hooks that ask for what cannot be computed, call the others: none was yet."""
        failures = [_find_failure(signature, context) for signature in self._signatures]
        for failure in failures:
            if isinstance(failure, NotProvidedError):
                self._skip_and_retry(context, failure)
                return
        if failures.count(None) == len(failures):
            raise error  # it is not an argument of a hook
        others: list[Entry] = []
        fatal: Exception | None = None
        for i, entry in enumerate(self.entries):
            if (failure := failures[i]) is None:
                others.append(entry)
            else:
                entry.call_stats[self.event].calls += 1
                fatal = _first_error(fatal, self._handle_failure(i, failure))
        if others:
            self.table.make(self.event, others).function(context)
        if fatal is not None:
            raise fatal

    def _handle_missing_args(
        self, i: int, context: object, error: NotProvidedError
    ) -> Exception | None:
        manager = self.table.manager
        return manager.handle_missing_args([self.entries[i]], self.event, context, error)

    def _add_time(self, i: int, ns: int) -> None:
        if self.entries[i].call_stats[self.event].add(ns):
            self.table.invalidate(self.event)  # compile it again, with or without a clock


def _find_failure(signature: CallSignature, context: object) -> Exception | None:
    """Return the error of the first argument of a call that cannot be computed."""
    for argument, form in always_loaded([signature]):
        try:
            value = getattr(context, argument)
            if form:
                CONVERSIONS[form](value)  # a lazy number keeps what was read
        except Exception as failure:
            failure.add_note(f"The argument '{argument}' could not be computed.")
            failure.__suppress_context__ = True  # it would be shown twice
            return failure
    return None


def _step_of(context: Any) -> int | None:
    """Return the step that a loop has reached, or None if its context does not provide it."""
    try:
        return int(context.step)
    except (AttributeError, NotProvidedError, TypeError, ValueError):
        return None


def _load_optional(
    context: Any, optional: tuple[tuple[str, WantedValue], ...], values: dict[str, Any]
) -> dict[str, Any]:
    """Return the optional arguments that the loop provides, by parameter.

    `values` has the arguments that were loaded for this event, so that each is computed once.
    """
    loaded = {}
    for parameter, wanted in optional:
        argument, form = wanted
        try:
            if argument not in values:
                values[argument] = getattr(context, argument)
            value = values[argument]
            if form == "eval":  # not kept, because hooks may change metrics
                value = CONVERSIONS[form](value)
            elif form:
                if wanted.key not in values:
                    values[wanted.key] = CONVERSIONS[form](value)
                value = values[wanted.key]
        except NotProvidedError:
            continue  # the parameter keeps its default, and `**kwargs` does not contain it
        loaded[parameter] = value
    return loaded


def _first_error(first: Exception | None, second: Exception | None) -> Exception | None:
    """Return the error to raise, with the second one as a note."""
    if first is not None and second is not None:
        first.add_note(str(second))
    return second if first is None else first
