"""Values as JSON that every program reads."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

from hookline.context import LazyFloat, read_lazy

__all__ = ["number", "plain", "shown"]

_DEEPEST = 50
_LONGEST = 2000
_LONGEST_INT = 10**400  # JSON has no limit, but Python's reader does


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON: what has no counterpart becomes its `repr`, so that nothing fails.

    Numbers on a device are read. NaN and the infinities become the strings "NaN", "Infinity" and
    "-Infinity", which JSON lacks as numbers; Python's `float` and JavaScript's `Number` read them.
    """
    kind: Any = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value.encode("utf-8", "replace").decode()  # lone surrogates are no UTF-8
    found = number(value)
    if found is not None:
        return found
    if depth > _DEEPEST:
        return "…"
    try:
        return _plain_container(value, depth + 1)
    except Exception:  # whatever a stranger's object does
        return shown(value)


def number(value: Any) -> Any:
    """Return a number as JSON (NaN and infinities as strings), or None when it is none."""
    if type(value) is bool:
        return int(value)
    if type(value) is not float and type(value) is not int:
        value = _read(value)
    if type(value) is int:
        return value if -_LONGEST_INT < value < _LONGEST_INT else None
    if type(value) is not float:
        return None
    if math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def shown(value: Any) -> str:
    """Return a value's `repr`, cut to a sane length; never fails."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr fails: {type(error).__name__}>"
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    return text.encode("utf-8", "replace").decode()


def _read(value: Any) -> Any:
    """Read a number that is lazy, in a tensor of one element, or numpy's."""
    try:
        if isinstance(value, LazyFloat):
            return float(value)
        value = read_lazy(value)
        if hasattr(type(value), "__array_interface__") and value.size == 1:
            value = value.item()
    except Exception:  # a lazy number whose source fails, an odd array
        return None
    if isinstance(value, bool | int | float):
        return float(value) if isinstance(value, float) else int(value)
    return None


def _plain_container(value: Any, depth: int) -> Any:
    if isinstance(value, Enum):
        return plain(value.value, depth)
    if isinstance(value, str):
        return plain(str.__str__(value), depth)
    if isinstance(value, os.PathLike):
        return os.fsdecode(cast("os.PathLike[str]", value))
    if isinstance(value, Mapping):
        return {_key(k): plain(v, depth) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), depth) for f in fields(value)}
    if _is_namespace(value):
        return plain(vars(value), depth)
    dump: Any = getattr(value, "model_dump", None)  # pydantic's
    if dump is not None:
        return plain(dump(mode="json"), depth)
    if isinstance(value, Set):
        return sorted((plain(v, depth) for v in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(v, depth) for v in value]
    return shown(value)


def _is_namespace(value: Any) -> bool:
    argparse = sys.modules.get("argparse")  # who has none of its namespaces need not import it
    return isinstance(value, SimpleNamespace) or (
        argparse is not None and isinstance(value, argparse.Namespace)
    )


def _key(key: Any) -> str:
    return cast(str, plain(key)) if isinstance(key, str) else shown(key)
