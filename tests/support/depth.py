"""How much the tests try: `make test` tries a part of what `make soak` tries.

A test marked `soak` runs in `make soak` only. One marked `soak(every=5)` runs each fifth of its
cases in `make test`, and the others in `make soak`. Tests of hypothesis run fewer cases in
`make test` than their settings say, and more in `make soak`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import settings


def is_left_to_soak(item: Any) -> bool:
    """Return whether a test runs in `make soak` only."""
    mark = item.get_closest_marker("soak")
    if mark is None:
        return False
    every = mark.kwargs.get("every")
    return every is None or max(item.callspec.indices.values()) % every != 0


def is_random(item: Any) -> bool:
    """Return whether hypothesis gives a test its arguments."""
    return hasattr(getattr(item, "obj", None), "hypothesis")


def scale_cases(items: Iterable[Any], factor: float, **changes: Any) -> list[Any]:
    """Run so many times the cases of each test of hypothesis; return one item of each test."""
    tests = list({item.function: item for item in items if is_random(item)}.values())
    for test in tests:
        own = test.obj._hypothesis_internal_use_settings
        count = max(1, round(factor * own.max_examples))
        test.obj._hypothesis_internal_use_settings = settings(own, max_examples=count, **changes)
    return tests
