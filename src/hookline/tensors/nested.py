"""Walking and copying nested values: the tensors in what modules take and return.

Values are nested in tuples, lists, mappings and other collections, and in the attributes of objects
such as dataclasses, a model's cache or a distribution. Modules, optimizers, classes, functions and
enum members are opaque: their attributes are not visited.
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

_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}
_OPAQUE = (
    *(Tensor, nn.Module, torch.optim.Optimizer),
    *(type, ModuleType, FunctionType, MethodType, Enum),
)
_COLLECTIONS = (tuple, list, deque, set, frozenset)
_MAX_PARTS = 1000  # an object with more parts and no tensor is not a cache yet to be filled
_MAX_DEPTH = 100  # deeper nesting could exceed Python's stack


@dataclass(frozen=True, slots=True)
class NotCopied:
    """Stands in for an object with tensors that cannot be copied, such as one with a `__del__`.

    Keeping the object itself would keep the graph alive, and what the model may still change.
    `kind` is its class.
    """

    kind: str


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value; each collection and object is visited once."""
    return _leaves(value, Tensor)


def _leaves(value: Any, leaf: type) -> Iterator[Any]:
    pending, seen = [value], dict[int, Any]()
    while pending:
        value = pending.pop()
        if isinstance(value, leaf):
            yield value
        elif type(value) not in _ATOMS and id(value) not in seen:
            seen[id(value)] = value  # kept alive, because an id is unique only while it lives
            pending.extend(reversed(_parts(value)))


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


def _parts(value: Any) -> list[Any]:
    """Return the elements of a collection, or the attributes of an object."""
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
    """Return a copy of a value with each tensor replaced by `f(tensor)`.

    Collections and objects keep their types, including named tuples and the outputs and caches of
    Hugging Face models. A mapping that cannot be rebuilt becomes a dict, and an object with tensors
    that cannot be copied becomes a `NotCopied`. The value is never changed. Containers that the
    model may fill later, such as a list or a cache, are copied even if they hold no tensors.

    `f` is called once for each tensor, even if it occurs in several places. Pass the same `memo` to
    map several values as one, and `leaf` to replace objects of another type.
    """
    memo = {} if memo is None else memo
    if isinstance(value, leaf):
        if id(value) not in memo:
            memo[id(value)] = (value, f(value))  # keeps the tensor, and so its id
        return memo[id(value)][1]
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:  # a cycle, or it occurs in several places
        return memo[id(value)][1]
    if depth == _MAX_DEPTH:
        return _not_copied(value, has_leaf=next(_leaves(value, leaf), None) is not None)
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
        return value if _all_same(items, value) else rebuild_sequence(value, items)
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(part, f, memo, leaf, depth) for key, part in value.items()}
        return value if _all_same(pairs.values(), value.values()) else rebuild_mapping(value, pairs)
    _map_object(value, f, memo, leaf, depth)
    return memo[id(value)][1]


def _map_object(
    value: Any, f: Callable[[Any], Any], memo: dict[int, Any], leaf: type, depth: int
) -> None:
    """Copy an object into the memo, before its attributes, which may refer back to it."""
    attributes = _attributes(value)
    has_leaf = next(_leaves(value, leaf), None) is not None
    new = _new_instance(value) if has_leaf or (attributes and not _has_many_parts(value)) else None
    if new is None:
        memo[id(value)] = (value, _not_copied(value, has_leaf=has_leaf))
        return
    memo[id(value)] = (value, new)
    slots = _slots(type(value))
    for name, part in attributes.items():
        mapped = map_tensors(part, f, memo, leaf, depth)
        if name in slots:
            slots[name].__set__(new, mapped)
        else:
            _dict_of(new)[name] = mapped


def _not_copied(value: Any, *, has_leaf: bool) -> Any:
    kind = type(value)
    return NotCopied(f"{kind.__module__}.{kind.__qualname__}") if has_leaf else value


def _has_many_parts(value: Any) -> bool:
    pending, seen = [value], dict[int, Any]()
    while pending and len(seen) + len(pending) < _MAX_PARTS:
        value = pending.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            pending.extend(_parts(value))
    return bool(pending)


def _all_same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def rebuild_sequence(value: Any, items: list[Any]) -> Any:
    """Return a collection of the same type with other items; a tuple if that is not possible."""
    if isinstance(value, list):
        new = copy(value)
        new[:] = items
        return new
    if hasattr(value, "_make"):
        return value._make(items)
    try:
        if isinstance(value, deque):
            return type(value)(items, value.maxlen)
        return type(value)(items)  # also torch's own types, such as the result of `max`
    except TypeError:
        return tuple(items)


def rebuild_mapping(value: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other values; a dict if that is not possible."""
    try:
        # Only for types whose copies have their own entries: otherwise this might change the
        # model's mapping.
        if isinstance(value, dict | UserDict):
            new = cast("dict[Any, Any]", copy(value))
            for key, part in pairs.items():
                new[key] = part
            return new
        return cast("Any", type(value))(pairs)
    except Exception:  # anything that its class may raise
        return pairs


# -- objects, without running code of their classes -----------------------------------------------


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its `__dict__` and its slots."""
    if isinstance(value, _OPAQUE):
        return {}
    attributes = dict(_dict_of(value))
    for name, member in _slots(type(value)).items():
        try:
            attributes[name] = member.__get__(value)
        except AttributeError:  # not set
            continue
    return attributes


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _slots(kind: type) -> dict[str, Any]:
    """Return the descriptors of a class's slots, by name."""
    return {
        name: member
        for cls in reversed(kind.__mro__)
        if "__slots__" in vars(cls)
        for name, member in vars(cls).items()
        if type(member) is MemberDescriptorType
    }


def _new_instance(value: Any) -> Any:
    """Return an object of the same class without its attributes; None if that is impossible."""
    kind = type(value)
    if hasattr(kind, "__del__"):  # it would also run for the copy, and free what both use
        return None
    try:
        return object.__new__(kind)
    except TypeError:  # it has more state than attributes, like SimpleNamespace
        pass
    try:
        new = copy(value)
    except Exception:  # anything that its class may raise
        return None
    return new if type(new) is kind and _dict_of(new) is not _dict_of(value) else None


def describe_structure(value: Any, depth: int = 2) -> str:
    """Return a short description of a value's types and shapes, such as those of a batch."""
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping) and depth:
        items = list(value.items())[:8]
        inside = ", ".join(f"'{k}': {describe_structure(v, depth - 1)}" for k, v in items)
        return f"{type(value).__name__}({inside})"
    if isinstance(value, list | tuple) and depth:
        inside = ", ".join(describe_structure(v, depth - 1) for v in value[:8])
        return f"{type(value).__name__}({inside}{', …' if len(value) > 8 else ''})"
    return type(value).__name__
