"""Tensors within what modules take and return, however deep they stand in it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor

__all__ = ["map_tensors", "parts", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, part in parts(value):
            yield from tensors_in(part)


def parts(value: Any) -> list[tuple[str, Any]]:
    """Return what a tuple, list, mapping or dataclass holds, by names; nothing for all others."""
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", None) or range(len(value))
        return [(str(name), part) for name, part in zip(names, value, strict=False)]
    if isinstance(value, Mapping):
        return [(str(name), part) for name, part in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in fields(value) if hasattr(value, f.name)]
    return []


def map_tensors(
    value: Any,
    f: Callable[[Any], Any],
    memo: dict[int, tuple[Any, Any]] | None = None,
    leaf: type = Tensor,
) -> Any:
    """Rebuild a value with each tensor replaced by `f(tensor)`.

    Tuples, lists, mappings and dataclasses stay what they are, named tuples and the outputs of
    Hugging Face models included. A mapping that cannot be rebuilt becomes a dict. Anything else is
    left as it is. The value itself is never changed.

    Args:
        value: What a module takes or returns.
        f: Called once for each tensor, also when it stands in several places.
        memo: What was replaced so far; give the same one to map several values as one.
        leaf: What is replaced, when it is not tensors.
    """
    if memo is None:
        memo = {}
    if isinstance(value, leaf):
        if id(value) not in memo:
            memo[id(value)] = (value, f(value))  # the tensor too: an id is unique while it lives
        return memo[id(value)][1]
    kind: Any = type(value)
    if kind is list:
        return [map_tensors(part, f, memo, leaf) for part in value]
    if kind is dict:
        return {key: map_tensors(part, f, memo, leaf) for key, part in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(part, f, memo, leaf) for part in value]
        return value if _same(items, value) else _sequence(value, items)
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(part, f, memo, leaf) for key, part in value.items()}
        return value if _same(pairs.values(), value.values()) else _mapping(value, pairs)
    if is_dataclass(value) and not isinstance(value, type):
        named = {name: map_tensors(part, f, memo, leaf) for name, part in parts(value)}
        return value if _same(named.values(), dict(parts(value)).values()) else _data(value, named)
    return value


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _sequence(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        new = copy(value)
        new[:] = items
        return new
    if hasattr(value, "_make"):
        return value._make(items)
    try:
        return type(value)(items)  # torch's own, such as the result of `max`
    except TypeError:
        return tuple(items)


def _mapping(value: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    try:
        # Only where a copy is known to hold its own entries. Setting those of another might change
        # what the model goes on with.
        if isinstance(value, dict | UserDict):
            new = cast("dict[Any, Any]", copy(value))
            for key, part in pairs.items():
                new[key] = part
            return new
        return cast("Any", type(value))(pairs)
    except Exception:  # whatever its class makes of it
        return pairs


def _data(value: Any, named: dict[str, Any]) -> Any:
    new = copy(value)
    for name, part in named.items():
        object.__setattr__(new, name, part)  # also where it is frozen
    return new
