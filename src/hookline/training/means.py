"""Means of numbers that stay on the device, at the price of a list's append."""

from __future__ import annotations

from typing import Any

import torch

from hookline.context import LazyFloat

__all__ = ["Means"]

_FOLD = 256  # so many tensors are kept before they become one sum


class Means:
    """Weighted running means by name.

    Adding a tensor to a sum on the device takes longer than a small model's forward; so tensors are
    kept, and summed many at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a number, or a tensor with one element."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = []
            self._weights[name] = 0.0
        if type(value) is float and weight == 1.0:  # a number needs no keeping
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._weights[name] += 1.0
            return
        kept.append(value if weight == 1.0 else value * weight)
        self._weights[name] += weight
        if len(kept) >= _FOLD:
            self._fold(name)

    def _fold(self, name: str) -> None:
        kept = self._kept[name]
        tensors = [v.detach().float().reshape(()) for v in kept if isinstance(v, torch.Tensor)]
        total: Any = sum(float(v) for v in kept if not isinstance(v, torch.Tensor))
        if tensors:
            total = torch.stack(tensors).sum() + total
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        kept.clear()

    def mean(self, name: str) -> LazyFloat | None:
        """The mean so far; None when nothing was added."""
        if name not in self._kept:
            return None
        if self._kept[name]:
            self._fold(name)
        return LazyFloat(self._sums[name] / self._weights[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the means and their weights, read."""
        return {
            name: {"mean": float(value), "weight": self._weights[name]}
            for name, value in self.means().items()
            if value is not None
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._kept = {name: [] for name in state}
        self._weights = {name: one["weight"] for name, one in state.items()}
        self._sums = {name: one["mean"] * one["weight"] for name, one in state.items()}

    def means(self) -> dict[str, LazyFloat | None]:
        """All means."""
        return {name: self.mean(name) for name in self._kept}
