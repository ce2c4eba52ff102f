"""The hash of a configuration: the same for the same meaning."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from hookline.runs.jsonable import plain

__all__ = ["canonical", "config_hash"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the `repr` of what has no other


def config_hash(config: Any) -> str:
    """Return the SHA-256 of a configuration's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical(config).encode()).hexdigest()


def canonical(config: Any) -> str:
    """Return a configuration as JSON that is the same for the same meaning.

    Keys are sorted, there is no space between, and a whole number is written as one (`1.0` as
    `1`), as RFC 8785 does. Tuples are lists, paths are strings; of an object that only has a
    `repr`, the address is left out.
    """
    return json.dumps(
        _same(plain(config)),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )


def _same(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _same(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _ADDRESS.sub("", value) if isinstance(value, str) else value
