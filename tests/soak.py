"""A pytest plugin that runs only the tests of hypothesis, with five times as many cases.

    pytest -p soak tests

The cases are new ones each time; the number that each test ran is printed at the end.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import settings

_FACTOR = 5
_cases: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests that hypothesis gives arguments, with more cases."""
    items[:] = [item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]
    for test in {item.function: item for item in items}.values():
        own = test.obj._hypothesis_internal_use_settings
        test.obj._hypothesis_internal_use_settings = settings(
            own, max_examples=_FACTOR * own.max_examples, derandomize=False, database=None
        )
        handle = test.obj.hypothesis
        handle.inner_test = _count(test.nodeid.partition("[")[0], handle.inner_test)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of cases of each test."""
    terminalreporter.section("cases")
    for name, count in _cases.items():
        terminalreporter.write_line(f"{count:7d} {name}")


def _count(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _cases[name] += 1
        return test(*args, **kwargs)

    return counted
