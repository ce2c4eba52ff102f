"""Means of numbers that stay on the device, at the price of a list's append."""

from __future__ import annotations

from typing import Any

import torch

from hookline.context import LazyFloat

__all__ = ["Means"]

_FOLD = 256  # so many tensors are kept before they become one sum


class Mean:
    """One weighted running mean.

    A loop with numbers in hand may add to `total` and `weight` itself.
    """

    __slots__ = ("_kept", "total", "weight")

    def __init__(self, total: Any = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight
        self._kept: list[torch.Tensor] = []

    def add(self, value: Any, weight: float = 1.0) -> None:
        """Add a number, or a tensor with one element."""
        self.weight += weight
        if not isinstance(value, torch.Tensor):  # a number needs no keeping
            self.total += float(value) * weight
            return
        self._kept.append(value if weight == 1.0 else value * weight)
        if len(self._kept) >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        tensors = [value.detach().float().reshape(()) for value in self._kept]
        self._kept.clear()
        self.total = torch.stack(tensors).sum() + self.total

    def mean(self) -> LazyFloat:
        """The mean so far."""
        if self._kept:
            self._fold()
        return LazyFloat(self.total / self.weight)


class Means:
    """Running means by name.

    Adding a tensor to a sum on the device takes longer than a small model's forward; so tensors are
    kept, and summed many at a time.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Mean] = {}

    def of(self, name: str) -> Mean:
        """Return the mean of this name, a new one where there is none."""
        return self._by_name.setdefault(name, Mean())

    def add(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a number, or a tensor with one element."""
        self.of(name).add(value, weight)

    def mean(self, name: str) -> LazyFloat | None:
        """The mean so far; None when nothing was added."""
        one = self._by_name.get(name)
        return None if one is None or not one.weight else one.mean()

    def means(self) -> dict[str, LazyFloat | None]:
        """All means."""
        return {name: one.mean() for name, one in self._by_name.items() if one.weight}

    def state_dict(self) -> dict[str, Any]:
        """Return the means and their weights, read."""
        return {
            name: {"mean": float(one.mean()), "weight": one.weight}
            for name, one in self._by_name.items()
            if one.weight
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._by_name = {
            name: Mean(one["mean"] * one["weight"], one["weight"]) for name, one in state.items()
        }
