"""One tensor within what a module returns: finding it, and putting another in its place.

Both can be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch

from hookline.errors import ProbeError
from hookline.tensors.nested import rebuild_mapping, rebuild_sequence

__all__ = ["Part", "find", "put"]

Part: TypeAlias = int | str | list[int | str] | tuple[int | str, ...] | None
"""Where a tensor stands: a position, a key or an attribute, or several, from the outside in."""


def find(output: Any, part: Part, name: str) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Return the way to a tensor, and the tensor.

    Args:
        output: What a module returned.
        part: Where the tensor stands; None for the first.
        name: The module's name, for messages.
    """
    if part is None:
        way = _first(output)
        if way is None:
            raise ProbeError(
                f"'{name}' returned a {type(output).__name__} without any tensor: there is nothing "
                "to edit."
            )
    else:
        way = tuple(part) if isinstance(part, list | tuple) else (part,)
    value = output
    for one in way:
        value = _step(value, one, name)
    if not isinstance(value, torch.Tensor):
        raise ProbeError(
            f"part={part!r} of what '{name}' returned is a {type(value).__name__}, and no tensor."
        )
    return way, value


def put(output: Any, way: tuple[Any, ...], new: torch.Tensor) -> Any:
    """Return the output with another tensor at the end of the way; the output is not changed."""
    if not way:
        return new
    one, rest = way[0], way[1:]
    if isinstance(output, tuple | list):
        at = _fields(output).index(one) if isinstance(one, str) else one % len(output)
        items = [put(item, rest, new) if i == at else item for i, item in enumerate(output)]
        if type(output) is tuple:
            return tuple(items)
        return items if type(output) is list else rebuild_sequence(output, items)
    if isinstance(output, Mapping):
        pairs = {k: put(item, rest, new) if k == one else item for k, item in output.items()}
        return pairs if type(output) is dict else rebuild_mapping(output, pairs)
    changed = copy(output)
    object.__setattr__(changed, one, put(getattr(output, one), rest, new))  # also where frozen
    return changed


def _first(value: Any) -> tuple[Any, ...] | None:
    """Return the way to the first tensor."""
    if isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, tuple | list):
        places: list[tuple[Any, Any]] = list(enumerate(value))
    elif isinstance(value, Mapping):
        places = list(value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        places = [(f.name, getattr(value, f.name, None)) for f in fields(value)]
    else:
        return None
    for place, inner in places:
        way = _first(inner)
        if way is not None:
            return (place, *way)
    return None


def _step(value: Any, one: Any, name: str) -> Any:
    if isinstance(value, Mapping) and one in value:
        return value[one]
    if isinstance(value, tuple | list):
        if isinstance(one, int) and -len(value) <= one < len(value):
            return value[one]
        if isinstance(one, str) and one in _fields(value):
            return getattr(value, one)
    elif isinstance(one, str) and not isinstance(value, torch.Tensor) and hasattr(value, one):
        return getattr(value, one)
    raise ProbeError(
        f"What '{name}' returned has no part {one!r}: it is a {type(value).__name__}{_has(value)}."
    )


def _fields(value: Any) -> tuple[str, ...]:
    return tuple(getattr(value, "_fields", ()))


def _has(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f" of {len(value)}"
    if isinstance(value, Mapping):
        return f" with {list(value)}"
    return ""
