"""Configurations as runs record them: with secrets masked, and hashed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from hookline.runs.jsonable import to_jsonable

__all__ = ["canonical_json", "config_hash", "mask_secrets"]

_MASK = "***"
_SECRET_KEY = re.compile(
    r"(^|_)(webhook(_url)?|secrets?|password|passwd|token|api_?key|credentials?)$", re.IGNORECASE
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the default `repr` of objects


def mask_secrets(value: Any) -> Any:
    """Return a configuration with the values of keys such as `password` masked, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: _MASK if _SECRET_KEY.search(str(key)) and item is not None else mask_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(item) for item in value]
    return value


def config_hash(config: Any) -> str:
    """Return the SHA-256 of a configuration's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def canonical_json(config: Any) -> str:
    """Return JSON that is the same for configurations with the same meaning.

    Keys are sorted, there is no white space, and integral floats are written as integers (`1.0` as
    `1`), as in RFC 8785. Tuples become lists and paths strings; memory addresses are removed from
    the `repr` of objects.
    """
    return json.dumps(
        _normalize(to_jsonable(config)),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )


def _normalize(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normalize(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _ADDRESS.sub("", value) if isinstance(value, str) else value
