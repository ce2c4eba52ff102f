"""Calls of hooks: those that are not events, and which hook is being called.

That is found from the frames of this thread, so that calls cost nothing.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from types import FrameType
from typing import Any

from hookline.dispatch.accounting import CallStats
from hookline.dispatch.compiler import DISPATCHER_FILE, HOOK_CALL
from hookline.dispatch.entry import Entry

HandleFailure = Callable[[Entry, str, int, Exception], Exception | None]


def guard_calls(entry: Entry, handle_failure: HandleFailure) -> Callable[..., Any]:
    """Return a function that calls another on behalf of a hook: isolated, counted and timed.

    `handle_failure` gets the hook, the name of the function, the number of the call and its
    exception; it returns the error to raise, if any.
    """
    call_stats = entry.call_stats

    def guarded(function: Callable[..., Any], *args: Any) -> Any:
        method = function.__name__  # failures in a row are counted per method, as per event
        stats = call_stats.get(method)
        if stats is None:
            stats = call_stats.setdefault(method, CallStats(clocked=True, rare=True))
        stats.calls += 1
        started = perf_counter_ns()
        try:
            return function(*args)
        except Exception as error:
            fatal = handle_failure(entry, method, stats.calls, error)
            if fatal is not None:
                raise fatal from error
            return None
        finally:
            stats.add(perf_counter_ns() - started)

    return guarded


_GUARDED = guard_calls.__code__.co_consts  # has the code of the function that it returns


def _calling_entries() -> Iterator[Entry | None]:
    """Yield the hooks that are being called on this thread, the innermost first.

    None stands for an event that is being fired, while no hook of it is called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _GUARDED:
            yield frame.f_locals["entry"]
        elif frame.f_code.co_filename.startswith(DISPATCHER_FILE):
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            call = HOOK_CALL.match(line)
            dispatcher = frame.f_globals["handle_failure"].__self__
            yield None if call is None else dispatcher.entries[int(call[1])]
        frame = frame.f_back


def find_calling_hook() -> str | None:
    """Return the name of the hook that is being called on this thread; None if there is none."""
    entry = next(_calling_entries(), None)
    return None if entry is None else entry.name


def find_limited_hook() -> Entry | None:
    """Return a hook that is being called on this thread, and not in all processes; or None.

    What needs all processes, such as a collective, can then raise an error instead of waiting for
    processes that will not come.
    """
    return next((one for one in _calling_entries() if one and one.ranks != "all"), None)


def is_firing(trainer: object) -> bool:
    """Return whether an event of this trainer or session is being fired on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(DISPATCHER_FILE):
            return getattr(frame.f_locals.get("context"), "trainer", None) is trainer
        frame = frame.f_back
    return False
