"""Running counts over tensors: histograms, and units that were ever alive."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.statistics import wide

__all__ = ["Alive", "Histograms", "unit_dimension"]

_LOW, _HIGH = -20, 20  # bins go from 2**-20 to 2**20, for each sign

_CHANNELS_SECOND = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.GroupNorm)


class _Kept:
    """A tensor for each key, changed by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[Any, Tensor] = {}

    def _change(self, key: Hashable, new: Tensor, join: Callable[[Any, Any], Tensor]) -> None:
        with self._lock:
            known = self._tensors.get(key)
            # Not in place: one may come from inference mode, where others cannot change it.
            self._tensors[key] = new if known is None else join(known, new.to(known.device))

    def _take(self) -> dict[Any, Tensor]:
        with self._lock:
            tensors, self._tensors = self._tensors, {}
        return tensors


class Histograms(_Kept):
    """Counts in bins that are the same for all tensors, so that they add up exactly.

    Each doubling of the magnitude, from 2**-20 to 2**20, has some bins, for each sign. What is
    smaller is in the bin around zero, what is larger in the outermost ones. What is not finite is
    in none.

    Args:
        bins: how many for each doubling.
    """

    def __init__(self, bins: int) -> None:
        super().__init__()
        self._bins = bins
        self._half = bins * (_HIGH - _LOW)

    def add(self, name: str, tensor: Tensor) -> None:
        """Count the values of a tensor; nothing waits for the device."""
        values = tensor.detach().reshape(-1)
        # In single precision the logarithm of a value next to an edge is that of the edge.
        values = values.to(wide(values.device))
        clean = values.nan_to_num(0.0, 0.0, 0.0)
        place = clean.abs().log2_().mul_(self._bins).floor_().sub_(_LOW * self._bins)
        place = place.clamp_(-1, self._half - 1).add_(1).copysign_(clean).add_(self._half)
        counts = torch.zeros(2 * self._half + 1, dtype=torch.int64, device=values.device)
        self._change(name, counts.scatter_add(0, place.long(), (clean == values).long()), torch.add)

    def take(self) -> dict[str, Tensor]:
        """Return the counts by name, unread, and begin anew."""
        return self._take()

    def shape(self, counts: Sequence[float]) -> dict[str, Any]:
        """Return counts with the edges of their bins.

        Empty bins at the ends are left out, several others beside each other are one.
        """
        filled = [i for i, count in enumerate(counts) if count] or [self._half]
        bins: list[int] = []
        edges = [self._edge(filled[0])]
        for i in range(filled[0], filled[-1] + 1):
            if bins and not counts[i] and not bins[-1]:
                edges.pop()
            else:
                bins.append(int(counts[i]))
            edges.append(self._edge(i + 1))
        return {"counts": bins, "edges": edges}

    def _edge(self, i: int) -> float:
        """Where bin `i` begins."""
        if i <= self._half:
            return -math.exp2(_HIGH - i / self._bins)
        return math.exp2(_LOW + (i - self._half - 1) / self._bins)


class Alive(_Kept):
    """Which units of modules have ever given anything but zero.

    A module that gives several tensors has the units of all of them.
    """

    def add(self, name: str, position: int, tensor: Tensor, dimension: int) -> None:
        """Note the units of one tensor of a module's output; nothing waits for the device."""
        if not tensor.ndim or not tensor.numel():
            return
        units = tensor.detach().movedim(dimension, -1)
        units = units.reshape(-1, units.shape[-1])
        alive = units.abs().amax(0) != 0  # several times as fast as `(units != 0).any(0)`
        self._change((name, position, len(alive)), alive, torch.logical_or)

    def take(self) -> dict[str, tuple[list[Tensor], int]]:
        """Return, by name, how many units were alive, unread, and how many there are."""
        found: dict[str, tuple[list[Tensor], int]] = {}
        for (name, _, units), alive in self._take().items():
            counts, known = found.get(name, ([], 0))
            found[name] = ([*counts, alive.sum()], known + units)
        return found


def unit_dimension(module: torch.nn.Module | None, tensor: Tensor) -> int:
    """The dimension of a tensor along which units stand.

    For what convolutions and their norms give that of the channels, also without a batch; else the
    second for images and volumes, and the last one for all others.
    """
    one = 0  # how many dimensions one of a batch has, where that is known
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        one = 1 + len(module.kernel_size)
    elif isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
        one = module._get_no_batch_dim()
    if one and tensor.ndim >= one:
        return -one
    channels_second = tensor.ndim > 3 or isinstance(module, _CHANNELS_SECOND)
    return 1 if channels_second and tensor.ndim > 1 else -1
