"""Tensors within what modules take and return, however deep they stand in it.

Values hold others in tuples, lists, mappings and other collections, and as attributes of objects:
dataclasses, a model's cache, a distribution. Modules, optimizers, classes, functions and members of
enums are whole: nobody looks into them.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["NotCopied", "describe_structure", "map_tensors", "named_tensors", "tensors_in"]

_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}
_WHOLE = (
    *(Tensor, nn.Module, torch.optim.Optimizer),
    *(type, ModuleType, FunctionType, MethodType, Enum),
)
_COLLECTIONS = (tuple, list, deque, set, frozenset)
_MANY = 1000  # parts: what holds that many and no tensor is no cache that is still to be filled

_DEEP = 100  # values, each in another: with more, Python's stack would end


@dataclass(frozen=True, slots=True)
class NotCopied:
    """Stands for what holds tensors and cannot be copied, such as an object with a `__del__`.

    Keeping the object itself would keep what the model goes on with, and its graph.

    Args:
        kind: The object's class.
    """

    kind: str


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value; each collection and object is looked into once."""
    return _leaves(value, Tensor)


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, each with an expression for it, such as `batch['x'][0]`."""
    pending, seen = [(name, value)], dict[int, Any]()
    while pending:
        name, value = pending.pop()
        if isinstance(value, Tensor):
            yield name, value
        elif type(value) not in _ATOMS and id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, _COLLECTIONS):
                parts = [(f"{name}[{i}]", part) for i, part in enumerate(cast("Any", value))]
            elif isinstance(value, Mapping):
                parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
            else:
                parts = [(f"{name}.{key}", part) for key, part in _attributes(value).items()]
            pending.extend(reversed(parts))


def _leaves(value: Any, leaf: type) -> Iterator[Any]:
    ahead, seen = [value], dict[int, Any]()
    while ahead:
        one = ahead.pop()
        if isinstance(one, leaf):
            yield one
        elif type(one) not in _ATOMS and id(one) not in seen:
            seen[id(one)] = one  # itself too: an id is unique while it lives
            ahead.extend(reversed(_parts(one)))


def _parts(value: Any) -> list[Any]:
    """Return what a collection or an object holds; nothing for what is whole."""
    if isinstance(value, _COLLECTIONS):
        return list(cast("Any", value))
    if isinstance(value, Mapping):
        return list(value.values())
    return list(_attributes(value).values())


def map_tensors(
    value: Any,
    f: Callable[[Any], Any],
    memo: dict[int, tuple[Any, Any]] | None = None,
    leaf: type = Tensor,
    depth: int = 0,
) -> Any:
    """Rebuild a value with each tensor replaced by `f(tensor)`.

    Collections and objects stay what they are, named tuples and the outputs and caches of Hugging
    Face models included. A mapping that cannot be rebuilt becomes a dict, an object with tensors
    that cannot be copied a `NotCopied`. The value is never changed, and what the model may go on to
    fill, such as a list or a cache, is copied also while there are no tensors in it.

    Args:
        value: What a module takes or returns.
        f: Called once for each tensor, also when it stands in several places.
        memo: What was replaced so far; give the same one to map several values as one.
        leaf: What is replaced, when it is not tensors.
        depth: How deep the value stands in another; what is too deep is a `NotCopied`, too.
    """
    if memo is None:
        memo = {}
    if isinstance(value, leaf):
        if id(value) not in memo:
            memo[id(value)] = (value, f(value))  # the tensor too: an id is unique while it lives
        return memo[id(value)][1]
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:  # it leads back to itself, or stands in several places
        return memo[id(value)][1]
    if depth == _DEEP:
        return _not_copied(value, holds=next(_leaves(value, leaf), None) is not None)
    depth += 1
    if kind is list:
        new: Any = []
        memo[id(value)] = (value, new)
        new += [map_tensors(part, f, memo, leaf, depth) for part in value]
        return new
    if kind is dict:
        new = {}
        memo[id(value)] = (value, new)
        for key, part in value.items():
            new[key] = map_tensors(part, f, memo, leaf, depth)
        return new
    if isinstance(value, _COLLECTIONS):
        items = [map_tensors(part, f, memo, leaf, depth) for part in cast("Any", value)]
        return value if _same(items, value) else _sequence(value, items)
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(part, f, memo, leaf, depth) for key, part in value.items()}
        return value if _same(pairs.values(), value.values()) else _mapping(value, pairs)
    _map_object(value, f, memo, leaf, depth)
    return memo[id(value)][1]


def _map_object(
    value: Any,
    f: Callable[[Any], Any],
    memo: dict[int, tuple[Any, Any]],
    leaf: type,
    depth: int,
) -> None:
    """Put what an object becomes into the memo, before its attributes: they may lead back to it."""
    attributes = _attributes(value)
    holds = next(_leaves(value, leaf), None) is not None
    new = _empty(value) if holds or (attributes and not _has_many_parts(value)) else None
    if new is None:
        memo[id(value)] = (value, _not_copied(value, holds=holds))
        return
    memo[id(value)] = (value, new)
    members = _members(type(value))
    for name, part in attributes.items():
        mapped = map_tensors(part, f, memo, leaf, depth)
        if name in members:
            members[name].__set__(new, mapped)
        else:
            _dict_of(new)[name] = mapped


def _not_copied(value: Any, *, holds: bool) -> Any:
    kind = type(value)
    return NotCopied(f"{kind.__module__}.{kind.__qualname__}") if holds else value


def _has_many_parts(value: Any) -> bool:
    ahead, seen = [value], dict[int, Any]()
    while ahead and len(seen) + len(ahead) < _MANY:
        one = ahead.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            ahead.extend(_parts(one))
    return bool(ahead)


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
        if isinstance(value, deque):
            return type(value)(items, value.maxlen)
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


# -- objects, without running any code of their classes -------------------------------------------


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds, in its `__dict__` and its slots."""
    if isinstance(value, _WHOLE):
        return {}
    held = dict(_dict_of(value))
    for name, member in _members(type(value)).items():
        try:
            held[name] = member.__get__(value)
        except AttributeError:  # not set
            continue
    return held


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _members(kind: type) -> dict[str, Any]:
    """Return the slots of a class."""
    return {
        name: member
        for cls in reversed(kind.__mro__)
        if "__slots__" in vars(cls)
        for name, member in vars(cls).items()
        if type(member) is MemberDescriptorType
    }


def _empty(value: Any) -> Any:
    """Return a new object of the same class for the same attributes; None where there is no way."""
    kind = type(value)
    if hasattr(kind, "__del__"):  # it would run for the copy, too, and free what is not its own
        return None
    try:
        return object.__new__(kind)
    except TypeError:  # there is more to it than attributes, as with SimpleNamespace
        pass
    try:
        new = copy(value)
    except Exception:  # whatever its class makes of it
        return None
    return new if type(new) is kind and _dict_of(new) is not _dict_of(value) else None


def describe_structure(value: Any, depth: int = 2) -> str:
    """Return what a batch is made of, in a few words: types and shapes, no values."""
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping) and depth:
        some = list(value.items())[:8]
        inside = ", ".join(f"'{k}': {describe_structure(v, depth - 1)}" for k, v in some)
        return f"{type(value).__name__}({inside})"
    if isinstance(value, list | tuple) and depth:
        inside = ", ".join(describe_structure(v, depth - 1) for v in value[:8])
        return f"{type(value).__name__}({inside}{', …' if len(value) > 8 else ''})"
    return type(value).__name__
