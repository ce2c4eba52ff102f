"""Bound methods that do not keep their object alive."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakMethod

__all__ = ["weak_method", "weaken_methods"]


def weak_method(method: Any) -> Any:
    """Return a function that calls a bound method while its object is alive.

    Anything but a bound method is returned as it is.
    """
    if not isinstance(method, MethodType):
        return method
    reference: WeakMethod[Callable[..., Any]] = WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


def weaken_methods(*owners: object) -> None:
    """Replace the bound methods among the attributes of objects by such functions.

    Objects that call each other back are in a cycle of references, and what they refer to is freed
    by the garbage collector only.
    """
    for owner in owners:
        attributes = vars(owner)
        attributes.update({name: weak_method(value) for name, value in attributes.items()})
