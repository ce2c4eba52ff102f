"""Running statistics over tensors that come one after another: sums, histograms, active units.

On the CPU a tensor is measured in pieces that fit into a cache, and the results are plain numbers.
On other devices the results are tensors with one element, so that nothing waits for the device.
Both are kept until they are taken, and then merged per module: with the formula of Chan, Golub and
LeVeque for means and squared distances, in double precision.

Values that are not finite are counted, and excluded from everything else.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from functools import reduce
from itertools import islice
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.histograms import count_values, pieces_of

_MAX_ROWS = 16384  # kept before they are merged, which waits for the device
_CANCELLATION = 0.1  # below this ratio of squared distances to squares, use float64
_SUMMED = (torch.float32, torch.float64)  # summed in their own type
_CHANNELS_SECOND = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.GroupNorm)


class Totals(NamedTuple):
    """The statistics of some values, as numbers or as tensors with one element.

    `size` counts all values. `mean`, `squares` (the sum of squared distances from the mean), `low`
    and `high` are over the finite ones.
    """

    size: int
    finite: Any = 0
    mean: Any = 0.0
    squares: Any = 0.0
    low: Any = math.inf
    high: Any = -math.inf
    nonzero: Any = 0

    @property
    def std(self) -> float:
        """The standard deviation of the population: divided by the count, not the count less 1."""
        return math.sqrt(max(self.squares, 0.0) / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The 2-norm."""
        return math.sqrt(max(self.squares, 0.0) + self.finite * self.mean * self.mean)

    def merge(self, other: Totals) -> Totals:
        """Return the statistics of the values of both, which are numbers."""
        if not (self.finite and other.finite):
            most = self if self.finite else other
            size, nonzero = self.size + other.size, self.nonzero + other.nonzero
            return most._replace(size=size, nonzero=nonzero)
        finite = self.finite + other.finite
        share, distance = other.finite / finite, other.mean - self.mean
        return Totals(
            self.size + other.size,
            finite,
            self.mean + distance * share,
            self.squares + other.squares + distance * distance * self.finite * share,
            min(self.low, other.low),
            max(self.high, other.high),
            self.nonzero + other.nonzero,
        )


class RunningSums:
    """Sums over the tensors of several modules. Threads may add at the same time.

    `spread` is for squared distances from the mean.
    """

    def __init__(self, *, spread: bool = True, extremes: bool = False, zeros: bool = False) -> None:
        self._spread, self._extremes, self._zeros = spread, extremes, zeros
        self._rows: deque[tuple[str, Totals]] = deque()
        self._last: tuple[Any, int, Totals] = (_no_tensor, 0, Totals(0))

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the sums of the module of this name, without waiting."""
        if tensor.numel():
            self._rows.append((name, self._measure_once(tensor)))
        if len(self._rows) > _MAX_ROWS:
            names, rows = self.take()
            self._rows.extend(self.merge(names, read_tensors(rows)).items())

    def take(self) -> tuple[list[str], list[Any]]:
        """Return what `merge` takes, with the numbers still on the device, and reset."""
        taken: list[tuple[str, Totals]] = []
        while self._rows:  # other threads may add and take meanwhile
            try:
                taken.append(self._rows.popleft())
            except IndexError:
                break
        self._last = (_no_tensor, 0, Totals(0))
        return [name for name, _ in taken], [number for _, row in taken for number in row]

    @staticmethod
    def merge(names: Iterable[str], numbers: Iterable[Any]) -> dict[str, Totals]:
        """Return the totals by module, from the numbers of all rows."""
        found: dict[str, Totals] = {}
        remaining = iter(numbers)
        for name in names:
            totals = Totals(*islice(remaining, len(Totals(0))))
            found[name] = found[name].merge(totals) if name in found else totals
        return found

    def _measure_once(self, tensor: Tensor) -> Totals:
        """Measure a tensor, unless it is the one that was measured last.

        A module often returns what its last child has returned.
        """
        if tensor.is_inference():  # it has no version
            return self._measure(tensor)
        known, version, totals = self._last
        if known() is tensor and version == tensor._version:
            return totals
        totals = self._measure(tensor)
        self._last = (ref(tensor), tensor._version, totals)
        return totals

    def _measure(self, tensor: Tensor) -> Totals:
        if not _can_read(tensor.device):
            return self._measure_on_device(tensor.detach().reshape(-1))
        return reduce(Totals.merge, map(self._measure_on_cpu, pieces_of(tensor)))

    def _measure_on_cpu(self, values: Tensor) -> Totals:
        """Measure values on the CPU, where results can be read to choose the next operation."""
        found = Totals(values.numel())
        if self._zeros:
            found = found._replace(nonzero=torch.count_nonzero(values).item())
        kept = values if values.dtype in _SUMMED else values.float()
        total = kept.sum().item()
        if not math.isfinite(total):  # also when only the sum is too large
            kept = kept[kept.isfinite()].double()
            total = kept.sum().item()
        finite = kept.numel()
        if not finite:
            return found
        mean = total / finite
        found = found._replace(finite=finite, mean=mean)
        if self._spread:
            found = found._replace(squares=_squares(kept, total, mean))
        if self._extremes:
            found = found._replace(low=kept.amin().item(), high=kept.amax().item())
        return found

    def _measure_on_device(self, values: Tensor) -> Totals:
        """Measure values without reading any result, so that nothing waits."""
        found = Totals(values.numel())
        if self._zeros:
            found = found._replace(nonzero=torch.count_nonzero(values))
        values = values if values.dtype in _SUMMED else values.float()
        clean = values.nan_to_num(0.0, 0.0, 0.0)
        is_finite = clean == values
        finite = torch.count_nonzero(is_finite)
        mean = clean.sum() / finite
        found = found._replace(finite=finite, mean=mean)
        if self._spread:  # excluded values are set to the mean: they add nothing
            spread = torch.var(torch.where(is_finite, values, mean), correction=0)
            found = found._replace(squares=spread * values.numel())
        if self._extremes:
            low = torch.where(is_finite, values, math.inf).amin()
            high = torch.where(is_finite, values, -math.inf).amax()
            found = found._replace(low=low, high=high)
        return found


def _can_read(device: torch.device) -> bool:
    """Return whether values can be read without waiting for the device."""
    return device.type == "cpu"


def _no_tensor() -> None:
    """Stand in for a weak reference whose tensor was freed."""


def _squares(values: Tensor, total: float, mean: float) -> float:
    """Return the sum of squared distances from the mean."""
    squares = torch.dot(values, values).item()
    distances = squares - total * mean
    if distances < _CANCELLATION * squares or not math.isfinite(squares):
        off = values.double() - mean
        return torch.dot(off, off).item()
    return distances


# -- histograms, and active units ------------------------------------------------------------------


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

    def take(self) -> dict[Any, Tensor]:
        """Return the tensors on the device, and reset."""
        with self._lock:
            tensors, self._tensors = self._tensors, {}
        return tensors


class RunningHistograms(_RunningTensors):
    """The counts of values by name, in the narrow bins of `histograms`."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Count the values of a tensor, without waiting for the device."""
        self._combine(name, count_values(tensor), torch.add)


class ActiveUnits(_RunningTensors):
    """Which units of modules have ever returned a value other than zero.

    The keys are the module's name, the position of a tensor in its output, and how many units the
    tensor has.
    """

    def add(self, name: str, position: int, tensor: Tensor, dimension: int) -> None:
        """Add a tensor, whose `dimension` counts units, without waiting for the device."""
        if not tensor.ndim or not tensor.numel():
            return
        units = tensor.detach().movedim(dimension, -1)
        units = units.reshape(-1, units.shape[-1])
        active = units.abs().amax(0) != 0  # several times as fast as `(units != 0).any(0)`
        self._combine((name, position, len(active)), active, torch.logical_or)


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
