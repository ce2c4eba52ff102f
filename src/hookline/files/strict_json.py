"""JSON from elsewhere: standard JSON in UTF-8, of a depth that every function can walk."""

from __future__ import annotations

import json
import math
from typing import Any, cast

MAX_DEPTH = 200
"""How deeply lists and objects may be nested."""

MAX_STATE_DEPTH = 400
"""The same for the state of a checkpoint, which has up to three levels for each level of a dict."""


def parse_json(data: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON in UTF-8. Python's parser accepts more than the standard: NaN,
            numbers above the range of floats, keys that occur twice, halves of surrogate pairs.
    """
    try:
        value = _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError(f"it is nested deeper than {max_depth} levels") from None
    if data.count(b"[") + data.count(b"{") > max_depth:
        _check_depth(value, max_depth)
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half of a surrogate pair") from None
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth + 1):
        level = [inner for item in level for inner in _contents(item)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {max_depth} levels")


def _contents(item: Any) -> list[Any]:
    """Return the lists and objects that a value contains."""
    values = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [one for one in cast("list[Any]", values) if isinstance(one, dict | list)]


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is above the range of floats")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not standard JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object, parse_float=_parse_float, parse_constant=_refuse_constant
)
