"""Means of numbers that stay on the device until somebody looks."""

from __future__ import annotations

from typing import Any

import torch

from hookline.context import LazyFloat

__all__ = ["Averages"]


class Averages:
    """Running means by name. Adding a tensor adds it on its device; nothing waits."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a number or a tensor of one element."""
        if isinstance(value, torch.Tensor):
            value = value.detach().float().reshape(())
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def mean(self, name: str) -> LazyFloat | None:
        """The mean so far; None when nothing was added."""
        if name not in self._sums:
            return None
        return LazyFloat(self._sums[name] / self._counts[name])

    def means(self, prefix: str) -> dict[str, LazyFloat | None]:
        """All means, each under prefix and name; a name with a slash stays as it is."""
        return {name if "/" in name else prefix + name: self.mean(name) for name in self._sums}
