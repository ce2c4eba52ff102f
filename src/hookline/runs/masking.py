"""What must not stand in a record: passwords, keys, and addresses that let others write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["MASK", "masked"]

MASK = "***"
_SECRET = re.compile(
    r"(^|_)(webhook(_url)?|secrets?|password|passwd|token|api_?key|credentials?)$", re.IGNORECASE
)


def masked(value: Any) -> Any:
    """Return a configuration with what its keys call a secret masked, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: MASK if _SECRET.search(str(key)) and item is not None else masked(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return value
