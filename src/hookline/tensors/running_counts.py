"""Running counts over tensors that come one after another: histograms, and active units."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.reading import widest_float

__all__ = ["ActiveUnits", "Histograms", "unit_dimension"]

_LOW, _HIGH = -20, 20  # bins cover magnitudes from 2**-20 to 2**20, for each sign

_CHANNELS_SECOND = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.GroupNorm)


class _RunningTensors:
    """One tensor per key, updated by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[Any, Tensor] = {}

    def _combine(self, key: Hashable, new: Tensor, join: Callable[[Any, Any], Tensor]) -> None:
        with self._lock:
            known = self._tensors.get(key)
            # Not in place: tensors made in inference mode cannot be changed outside of it.
            self._tensors[key] = new if known is None else join(known, new.to(known.device))

    def _take(self) -> dict[Any, Tensor]:
        with self._lock:
            tensors, self._tensors = self._tensors, {}
        return tensors


class Histograms(_RunningTensors):
    """Histograms with the same bins for all tensors, so that counts can be added exactly.

    Each doubling of the magnitude, from 2**-20 to 2**20, is divided into `bins`, for each sign.
    Smaller values are in the bin around zero, larger ones in the outermost bins. Values that are
    not finite are not counted.
    """

    def __init__(self, bins: int) -> None:
        super().__init__()
        self._bins = bins
        self._half = bins * (_HIGH - _LOW)

    def add(self, name: str, tensor: Tensor) -> None:
        """Count the values of a tensor, without waiting for the device."""
        values = tensor.detach().reshape(-1)
        # In float32 the logarithm of a value next to an edge equals that of the edge.
        values = values.to(widest_float(values.device))
        clean = values.nan_to_num(0.0, 0.0, 0.0)
        index = clean.abs().log2_().mul_(self._bins).floor_().sub_(_LOW * self._bins)
        index = index.clamp_(-1, self._half - 1).add_(1).copysign_(clean).add_(self._half)
        counts = torch.zeros(2 * self._half + 1, dtype=torch.int64, device=values.device)
        counts = counts.scatter_add(0, index.long(), (clean == values).long())
        self._combine(name, counts, torch.add)

    def take(self) -> dict[str, Tensor]:
        """Return the counts by name as tensors on the device, and reset."""
        return self._take()

    def shape(self, counts: Sequence[float]) -> dict[str, Any]:
        """Return counts with the edges of their bins.

        Empty bins at the ends are omitted; adjacent empty bins elsewhere are merged into one.
        """
        filled = [i for i, count in enumerate(counts) if count] or [self._half]
        bins: list[int] = []
        edges = [self._lower_edge(filled[0])]
        for i in range(filled[0], filled[-1] + 1):
            if bins and not counts[i] and not bins[-1]:
                edges.pop()
            else:
                bins.append(int(counts[i]))
            edges.append(self._lower_edge(i + 1))
        return {"counts": bins, "edges": edges}

    def _lower_edge(self, i: int) -> float:
        if i <= self._half:
            return -math.exp2(_HIGH - i / self._bins)
        return math.exp2(_LOW + (i - self._half - 1) / self._bins)


class ActiveUnits(_RunningTensors):
    """Which units of modules have ever returned a value other than zero.

    A module that returns several tensors has the units of all of them.
    """

    def add(self, name: str, position: int, tensor: Tensor, dimension: int) -> None:
        """Add the tensor at a position of a module's output, without waiting for the device.

        `dimension` is the one that counts units.
        """
        if not tensor.ndim or not tensor.numel():
            return
        units = tensor.detach().movedim(dimension, -1)
        units = units.reshape(-1, units.shape[-1])
        active = units.abs().amax(0) != 0  # several times as fast as `(units != 0).any(0)`
        self._combine((name, position, len(active)), active, torch.logical_or)

    def take(self) -> dict[str, tuple[list[Tensor], int]]:
        """Return by name the numbers of active units, on the device, and of all; and reset."""
        found: dict[str, tuple[list[Tensor], int]] = {}
        for (name, _, units), active in self._take().items():
            counts, total = found.get(name, ([], 0))
            found[name] = ([*counts, active.sum()], total + units)
        return found


def unit_dimension(module: torch.nn.Module | None, tensor: Tensor) -> int:
    """Return the dimension of a module's output that counts units.

    For convolutions and their norms it is the channel dimension, with or without a batch
    dimension. Otherwise it is the second one for images and volumes, and the last one for the rest.
    """
    unbatched = 0  # the number of dimensions of one sample, where it is known
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        unbatched = 1 + len(module.kernel_size)
    elif isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
        unbatched = module._get_no_batch_dim()
    if unbatched and tensor.ndim >= unbatched:
        return -unbatched
    channels_second = tensor.ndim > 3 or isinstance(module, _CHANNELS_SECOND)
    return 1 if channels_second and tensor.ndim > 1 else -1
