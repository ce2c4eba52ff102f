"""A pytest plugin that runs what `make test` leaves out, and many more cases of hypothesis.

    pytest -p soak -n 3 tests

The tests marked `soak` run, and those of hypothesis, with new cases each time; the number of cases
that each test ran is printed at the end.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from depth import is_left_to_soak, is_random, scale_cases

_FACTOR = 5
_cases: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Keep the tests that hypothesis gives arguments, with more cases, and those marked `soak`."""
    left_out = [item for item in items if not is_random(item) and not is_left_to_soak(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_random(item) or is_left_to_soak(item)]
    for test in scale_cases(items, _FACTOR, derandomize=False, database=None):
        handle = test.obj.hypothesis
        handle.inner_test = _count(test.nodeid.partition("[")[0], handle.inner_test)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of cases of each test."""
    terminalreporter.section("cases")
    for name, count in _cases.items():
        terminalreporter.write_line(f"{count:7d} {name}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the numbers of cases from a worker of xdist."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cases"] = dict(_cases)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Add the numbers of cases of a worker."""
    _cases.update(getattr(node, "workeroutput", {}).get("cases", {}))


def _count(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _cases[name] += 1
        return test(*args, **kwargs)

    return counted
