"""Calls on behalf of a hook that are not events, such as those of a probe."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from hookline.dispatch.accounting import CallStats
from hookline.dispatch.entry import Entry

__all__ = ["guard_calls"]

HandleFailure = Callable[[Entry, str, int, Exception], Exception | None]


def guard_calls(entry: Entry, handle_failure: HandleFailure) -> Callable[..., Any]:
    """Return a function that calls another on behalf of a hook: isolated, counted and timed.

    Args:
        entry: The hook.
        handle_failure: Called with the hook, the name of the function, the number of the call and
            its exception; returns the error to raise, if any.
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
