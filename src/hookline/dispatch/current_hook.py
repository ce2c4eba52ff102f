"""Which hook is being called, for hooks that are not called in all processes.

What needs all processes, such as a collective, can then raise an error instead of waiting for
processes that will not come. Hooks that are called in all processes are not marked, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["LimitedHook", "current_limited_hook", "mark_calls"]


@dataclass(frozen=True)
class LimitedHook:
    """A hook that is called in some processes only."""

    name: str
    ranks: str


_current: ContextVar[LimitedHook | None] = ContextVar("hookline_limited_hook", default=None)


def current_limited_hook() -> LimitedHook | None:
    """Return the hook that is being called on this thread, if it is called in some processes."""
    return _current.get()


def mark_calls(function: Callable[..., Any], name: str, ranks: str) -> Callable[..., Any]:
    """Return a function that calls another on behalf of a hook with these `ranks`."""
    if ranks == "all":
        return function
    hook = LimitedHook(name, ranks)

    def marked(*args: Any, **kwargs: Any) -> Any:
        token = _current.set(hook)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)

    marked.__name__ = getattr(function, "__name__", name)
    return marked
