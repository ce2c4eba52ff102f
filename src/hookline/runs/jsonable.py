"""Conversion of any value to standard JSON; hashes of configurations."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

from hookline.context import LazyFloat, read_lazy
from hookline.masking import mask_secrets

_MAX_DEPTH = 50
_MAX_LENGTH = 2000
_INT_LIMIT = 10**400  # JSON has no limit, but Python's parser does
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the default `repr` of objects


def to_jsonable(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Return a value as JSON types. It never fails: other objects become their `repr`.

    `outer` has the ids of the values that this one is within.
    """
    kind: Any = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value.encode("utf-8", "replace").decode()  # lone surrogates are not valid UTF-8
    number = to_json_number(value)
    if number is not None:
        return number
    if len(outer) > _MAX_DEPTH or id(value) in outer:
        return "…"
    try:
        return _convert_object(value, (*outer, id(value)))
    except Exception:  # an object's methods may raise anything
        return safe_repr(value)


def to_json_number(value: Any) -> Any:
    """Return a number as JSON (NaN and infinities as strings), or None for other values."""
    if type(value) is bool:
        return int(value)
    if type(value) is not float and type(value) is not int:
        value = _read_number(value)
    if type(value) is int:
        return value if -_INT_LIMIT < value < _INT_LIMIT else None
    if type(value) is not float:
        return None
    if math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def safe_repr(value: Any) -> str:
    """Return a value's `repr`, shortened if it is very long. It never fails."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr fails: {type(error).__name__}>"
    text = text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "…"
    return text.encode("utf-8", "replace").decode()


def _read_number(value: Any) -> Any:
    """Return a lazy number, a tensor with one element or a numpy number as int or float."""
    try:
        if isinstance(value, LazyFloat):
            return float(value)
        value = read_lazy(value)
        if hasattr(type(value), "__array_interface__") and value.size == 1:
            value = value.item()
    except Exception:  # computing a lazy number may fail
        return None
    if isinstance(value, bool | int | float):
        return float(value) if isinstance(value, float) else int(value)
    return None


def _convert_object(value: Any, outer: tuple[int, ...]) -> Any:
    if isinstance(value, Enum):
        return to_jsonable(value.value, outer)
    if isinstance(value, str):
        return to_jsonable(str.__str__(value), outer)
    if isinstance(value, os.PathLike):
        return os.fsdecode(cast("os.PathLike[str]", value))
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    argparse = sys.modules.get("argparse")  # not imported: no value is one of its namespaces
    if isinstance(value, (SimpleNamespace, *((argparse.Namespace,) if argparse else ()))):
        value = vars(value)
    if isinstance(value, Mapping):
        return {_key(k): to_jsonable(v, outer) for k, v in value.items()}
    dump: Any = getattr(value, "model_dump", None)  # pydantic's
    if dump is not None:
        return to_jsonable(dump(mode="json"), outer)
    if isinstance(value, Set):
        return sorted((to_jsonable(v, outer) for v in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_jsonable(v, outer) for v in value]
    return safe_repr(value)


def _key(key: Any) -> str:
    return cast(str, to_jsonable(key)) if isinstance(key, str) else safe_repr(key)


# -- configurations --------------------------------------------------------------------------------


def config_hash(config: Any) -> str:
    """Return the SHA-256 of a configuration's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def canonical_json(config: Any) -> str:
    """Return JSON that is the same for configurations with the same meaning.

    Keys are sorted, there is no white space, and integral floats are written as integers (`1.0` as
    `1`), as in RFC 8785.
    """
    return json.dumps(
        _normalize(make_comparable(config)),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )


def make_comparable(value: Any) -> Any:
    """Return JSON without memory addresses, with secrets masked by their names.

    So a configuration is the same with its secrets, with others, and as it is recorded. Known
    values (`hookline.masking`) are not masked: the result must not depend on the environment.
    """
    return remove_addresses(mask_secrets(to_jsonable(value), known_values=False))


def _normalize(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normalize(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def remove_addresses(value: Any) -> Any:
    """Return JSON without the memory addresses that the `repr` of objects has."""
    if isinstance(value, dict):
        return {name: remove_addresses(item) for name, item in value.items()}
    if isinstance(value, list):
        return [remove_addresses(item) for item in value]
    return _ADDRESS.sub("", value) if isinstance(value, str) else value
