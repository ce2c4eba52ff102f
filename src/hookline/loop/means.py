"""Running means of numbers and of tensors, which stay on their device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline.context import LazyFloat, to_float

_MAX_KEPT = 256  # tensors are kept up to this number, and then summed


class Mean:
    """One weighted running mean.

    A loop that has numbers may add to `total` and `weight` itself.
    """

    __slots__ = ("_kept", "total", "weight")

    def __init__(self, total: Any = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight
        self._kept: list[torch.Tensor] = []

    def add(self, value: Any, weight: float = 1.0) -> None:
        """Add a number, or a tensor with one element."""
        self.weight += weight
        if not isinstance(value, torch.Tensor):
            self.total += to_float(value) * weight
            return
        self._kept.append(value if weight == 1.0 else value * weight)
        if len(self._kept) >= _MAX_KEPT:
            self._sum_kept()

    def _sum_kept(self) -> None:
        kept, self._kept = self._kept, []
        try:
            values = torch.stack(kept)
        except RuntimeError:  # some have a dimension, and others have none
            values = torch.stack([value.reshape(()) for value in kept])
        self.total = values.detach().float().sum() + self.total

    def mean(self) -> LazyFloat:
        """Return the mean so far."""
        if self._kept:
            self._sum_kept()
        return LazyFloat(self.total / self.weight)


class Means:
    """Running means by name.

    Adding a tensor to a sum on the device takes longer than the forward of a small model. Tensors
    are therefore kept, at the cost of a list's append, and summed many at a time.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Mean] = {}

    def of(self, name: str) -> Mean:
        """Return the mean with this name; make it if there is none."""
        return self._by_name.setdefault(name, Mean())

    def add(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a number, or a tensor with one element."""
        mean = self._by_name.get(name)
        (self.of(name) if mean is None else mean).add(value, weight)

    def mean(self, name: str) -> LazyFloat | None:
        """Return the mean so far; None if nothing was added."""
        mean = self._by_name.get(name)
        return None if mean is None or not mean.weight else mean.mean()

    def means(self) -> dict[str, LazyFloat | None]:
        """Return all means by name."""
        return {name: mean.mean() for name, mean in self._by_name.items() if mean.weight}

    def state_dict(self) -> dict[str, Any]:
        """Return the means and their weights as numbers."""
        return {
            name: {"mean": float(mean.mean()), "weight": mean.weight}
            for name, mean in self._by_name.items()
            if mean.weight
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._by_name = {
            name: Mean(saved["mean"] * saved["weight"], saved["weight"])
            for name, saved in state.items()
        }


def add_means(several: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return the means of several states of `Means`, with the sums of their weights."""
    means: dict[Any, Any] = {}
    for name in dict.fromkeys(name for one in several for name in one):
        found = [one[name] for one in several if name in one]
        weight = sum(one["weight"] for one in found)
        total = sum(one["mean"] * one["weight"] for one in found)
        means[name] = {"mean": total / weight, "weight": weight}
    return means
