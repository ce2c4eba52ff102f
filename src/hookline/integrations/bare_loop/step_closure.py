"""Closures of `optimizer.step(closure)`, which run forward and backward within the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["find_closure", "notify_first_call"]


def find_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of `optimizer.step`, the optimizer included."""
    return kwargs.get("closure") or (args[1] if len(args) > 1 else None)


def notify_first_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], evaluated: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a closure that calls back after its first evaluation."""
    closure: Any = find_closure(args, kwargs)
    is_first = True

    def evaluate() -> Any:
        nonlocal is_first
        result = closure()
        if is_first:
            is_first = False
            evaluated()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs
