"""Addressing a tensor within a module's input or output, and elements within a tensor.

`get_at` and `set_at` can be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch

from hookline.arguments import show_value
from hookline.errors import ConfigError, ProbeError
from hookline.tensors.nested import rebuild_mapping, rebuild_sequence

__all__ = ["Part", "get_at", "parse_index", "set_at"]

Part: TypeAlias = int | str | list[int | str] | tuple[int | str, ...] | None
"""The path to a tensor: a position, a key or an attribute, or several; None for the first."""


_MAX_DEPTH = 100  # a container may be within itself


def get_at(value: Any, part: Part, subject: str) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Return the path to a tensor within a value, and the tensor.

    `subject` is what the value is, for messages: "output of 'blocks.0'".
    """
    if part is None:
        path = _find_first(value)
        if path is None:
            raise ProbeError(
                f"The {subject} is a {type(value).__name__} without any tensor. There is nothing "
                "to edit."
            )
    else:
        path = tuple(part) if isinstance(part, list | tuple) else (part,)
    found = value
    for key in path:
        found = _get_item(found, key, subject)
    if not isinstance(found, torch.Tensor):
        raise ProbeError(
            f"part={show_value(part)} of the {subject} is a {type(found).__name__}, not a tensor."
        )
    return path, found


def set_at(output: Any, path: tuple[Any, ...], new: torch.Tensor) -> Any:
    """Return a copy of the output with another tensor at the end of the path."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(output, tuple | list):
        at = _fields(output).index(key) if isinstance(key, str) else key % len(output)
        items = [set_at(item, rest, new) if i == at else item for i, item in enumerate(output)]
        if type(output) is tuple:
            return tuple(items)
        return items if type(output) is list else rebuild_sequence(output, items)
    if isinstance(output, Mapping):
        pairs = {k: set_at(item, rest, new) if k == key else item for k, item in output.items()}
        return pairs if type(output) is dict else rebuild_mapping(output, pairs)
    changed = copy(output)
    object.__setattr__(changed, key, set_at(getattr(output, key), rest, new))  # also if frozen
    return changed


def _find_first(value: Any, depth: int = 0) -> tuple[Any, ...] | None:
    """Return the path to the first tensor."""
    if isinstance(value, torch.Tensor):
        return ()
    if depth == _MAX_DEPTH:
        return None
    if isinstance(value, tuple | list):
        items: list[tuple[Any, Any]] = list(enumerate(value))
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name, None)) for f in fields(value)]
    else:
        return None
    for key, inner in items:
        path = _find_first(inner, depth + 1)
        if path is not None:
            return (key, *path)
    return None


def _get_item(value: Any, key: Any, subject: str) -> Any:
    if isinstance(value, Mapping) and key in value:
        return value[key]
    if isinstance(value, tuple | list):
        if isinstance(key, int) and -len(value) <= key < len(value):
            return value[key]
        if isinstance(key, str) and key in _fields(value):
            return getattr(value, key)
    elif isinstance(key, str) and not isinstance(value, torch.Tensor) and hasattr(value, key):
        return getattr(value, key)
    items = f" with {list(value)}" if isinstance(value, Mapping) else ""
    items = f" of {len(value)}" if isinstance(value, tuple | list) else items
    raise ProbeError(
        f"The {subject} has no part {show_value(key)}: it is a {type(value).__name__}{items}."
    )


def _fields(value: Any) -> tuple[str, ...]:
    return tuple(getattr(value, "_fields", ()))


def parse_index(index: Any, option: str) -> Any:
    """Return an index into a tensor, also from text: `":, -1"` in a config file is `x[:, -1]`.

    `option` is the option's name, for the `ConfigError` that is raised if it is not an index.
    """
    if isinstance(index, str):
        parts = (part.strip() for part in index.strip("[] ").split(","))
        return tuple(_parse_part(part, f"{option}={show_value(index)}") for part in parts)
    for part in index if isinstance(index, tuple) else (index,):
        if not (
            isinstance(part, int | slice | list | torch.Tensor) or part is Ellipsis or part is None
        ):
            raise ConfigError(
                f"{option}={show_value(index)} is not an index. Give a number, a slice, a list "
                "of numbers, a "
                "mask, a tuple of these, or text such as ':, -1'."
            )
    return index


def _parse_part(part: str, given: str) -> Any:
    if part == "...":
        return Ellipsis
    try:
        numbers = [int(number) if number.strip() else None for number in part.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if 2 <= len(numbers) <= 3:
        return slice(*numbers)
    raise ConfigError(
        f"{given} is not an index: {show_value(part)} is neither a number nor a slice."
    )
