"""A clock that only tests move, so that what they measure does not depend on the machine."""

from __future__ import annotations

from types import ModuleType

import pytest


class FakeClock:
    """Stands in for the functions of `time` that modules have imported by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.ns = 10**9
        functions = {
            "perf_counter": lambda: self.ns / 1e9,
            "perf_counter_ns": lambda: self.ns,
        }
        for module in modules:
            for name in functions.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, functions[name])

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.ns += round(seconds * 1e9)
