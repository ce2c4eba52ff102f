"""Running statistics over tensors that come one after another: sums, histograms, active units.

On the CPU a tensor is measured in pieces that fit into a cache, and the results are plain numbers.
On other devices the results are tensors with one element, so that nothing waits for the device.
Both are kept as rows, and rows are merged into one per module: with the formula of Chan, Golub and
LeVeque for means and squared distances, in float64 where the device has it.

Values that are not finite are counted, and excluded from everything else.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from hookline.tensors.device_numbers import widest_float

Row: TypeAlias = list[Any]
"""One entry per column: a number, or a tensor with one element on the device."""

_SIZE, _FINITE, _MEAN, _SQUARES, _LOW, _HIGH, _NONZERO = range(7)  # columns

_PIECE = 1 << 17  # elements measured at once on the CPU
_MAX_ROWS = 4096  # kept before they are merged
_CANCELLATION = 0.1  # below this ratio of squared distances to squares, use float64
_LOW_POWER, _HIGH_POWER = -20, 20  # histograms cover 2**-20 to 2**20, for each sign
_CHANNELS_SECOND = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.GroupNorm)


@dataclass(frozen=True)
class Totals:
    """The statistics of one module's values.

    `size` counts all values. `mean`, `squares` (the sum of squared distances from the mean), `low`
    and `high` are over the finite ones.
    """

    size: int
    finite: int
    mean: float
    squares: float
    low: float
    high: float
    nonzero: int

    @property
    def std(self) -> float:
        """The standard deviation of the population: divided by the count, not the count less 1."""
        return math.sqrt(max(self.squares, 0.0) / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The 2-norm."""
        return math.sqrt(max(self.squares, 0.0) + self.finite * self.mean**2)


class RunningSums:
    """Sums over the tensors of several modules. Threads may add at the same time.

    `spread` is for squared distances from the mean.
    """

    def __init__(self, *, spread: bool = True, extremes: bool = False, zeros: bool = False) -> None:
        self._spread, self._extremes, self._zeros = spread, extremes, zeros
        self._rows: deque[tuple[int, torch.device, Row]] = deque()
        self._tables: dict[torch.device, Tensor] = {}
        self._lock = threading.Lock()
        self._last: tuple[Any, int, list[Row]] = (_no_tensor, 0, [])

    def add(self, number: int, tensor: Tensor) -> None:
        """Add a tensor to the sums of the module with this number, without waiting."""
        rows, device = self._rows_of(tensor), tensor.device
        for row in rows:
            self._rows.append((number, device, row))
        if len(self._rows) > _MAX_ROWS:
            self._merge(number + 1)

    def take(self, modules: int) -> Tensor | None:
        """Return a table on the device with a row per module, and reset; None if it is empty."""
        self._merge(modules)
        with self._lock:
            tables, self._tables = list(self._tables.values()), {}
        self._last = (_no_tensor, 0, [])
        if len(tables) < 2:
            return tables[0] if tables else None
        home = tables[0].device
        ids = [torch.arange(len(table), device=home) for table in tables]
        together = torch.cat([table.to(home, widest_float(home)) for table in tables])
        return _merged(together, torch.cat(ids), modules)

    @staticmethod
    def read(table: Sequence[Sequence[float]]) -> dict[int, Totals]:
        """Return the totals by module number, from a table that was copied to the CPU."""
        return {number: _totals(row) for number, row in enumerate(table) if row[_SIZE]}

    # -- rows -------------------------------------------------------------------------------------

    def _rows_of(self, tensor: Tensor) -> list[Row]:
        """Measure a tensor, unless it is the one that was measured last.

        A module often returns what its last child has returned.
        """
        if tensor.is_inference():  # it has no version
            return self._measure(tensor)
        known, version, rows = self._last
        if known() is tensor and version == tensor._version:
            return rows
        rows = self._measure(tensor)
        self._last = (ref(tensor), tensor._version, rows)
        return rows

    def _measure(self, tensor: Tensor) -> list[Row]:
        size = tensor.numel()
        if not size:
            return []
        values = tensor.detach().reshape(-1)
        if not _can_read(tensor.device):
            return [self._measure_on_device(values)]
        pieces = (values,) if size <= _PIECE else torch.split(values, _PIECE)
        return [self._measure_on_cpu(piece) for piece in pieces]

    def _measure_on_cpu(self, values: Tensor) -> Row:
        """Measure values on the CPU, where results can be read to choose the next operation."""
        row = _empty(values.numel())
        if self._zeros:
            row[_NONZERO] = torch.count_nonzero(values).item()
        kept = values if values.dtype in _SUMMED else values.float()
        total = kept.sum().item()
        if not math.isfinite(total):  # also when only the sum is too large
            kept = kept[kept.isfinite()].double()
            total = kept.sum().item()
        row[_FINITE] = finite = kept.numel()
        if not finite:
            return row
        row[_MEAN] = mean = total / finite
        if self._spread:
            row[_SQUARES] = _squares(kept, total, mean)
        if self._extremes:
            row[_LOW], row[_HIGH] = kept.amin().item(), kept.amax().item()
        return row

    def _measure_on_device(self, values: Tensor) -> Row:
        """Measure values without reading any result, so that nothing waits."""
        row = _empty(values.numel())
        if self._zeros:
            row[_NONZERO] = torch.count_nonzero(values)
        values = values if values.dtype in _SUMMED else values.float()
        clean = values.nan_to_num(0.0, 0.0, 0.0)
        is_finite = clean == values
        row[_FINITE] = finite = torch.count_nonzero(is_finite)
        row[_MEAN] = mean = clean.sum() / finite
        if self._spread:  # excluded values are set to the mean: they add nothing
            spread = torch.var(torch.where(is_finite, values, mean), correction=0)
            row[_SQUARES] = spread * values.numel()
        if self._extremes:
            row[_LOW] = torch.where(is_finite, values, math.inf).amin()
            row[_HIGH] = torch.where(is_finite, values, -math.inf).amax()
        return row

    # -- merging ----------------------------------------------------------------------------------

    def _merge(self, modules: int) -> None:
        """Merge all rows of a module into one, for each device."""
        with self._lock:
            by_device: dict[torch.device, list[tuple[int, Row]]] = {}
            for _ in range(len(self._rows)):  # other threads may add meanwhile
                number, device, row = self._rows.popleft()
                by_device.setdefault(device, []).append((number, row))
            for device, rows in by_device.items():
                numbers, values = [number for number, _ in rows], [row for _, row in rows]
                ids, table = _to_device(numbers, torch.int64, device), _table(values, device)
                known = self._tables.get(device)
                modules = max(modules, max(numbers) + 1)
                if known is not None:
                    modules = max(modules, len(known))
                    ids = torch.cat([torch.arange(len(known), device=device), ids])
                    table = torch.cat([known, table])
                self._tables[device] = _merged(table, ids, modules)


_SUMMED = (torch.float32, torch.float64)  # summed in their own type


def _can_read(device: torch.device) -> bool:
    """Return whether values can be read without waiting for the device."""
    return device.type == "cpu"


def _no_tensor() -> None:
    """Stand in for a weak reference whose tensor was freed."""


def _empty(size: int) -> Row:
    return [size, 0, 0.0, 0.0, math.inf, -math.inf, 0]


def _squares(values: Tensor, total: float, mean: float) -> float:
    """Return the sum of squared distances from the mean."""
    squares = torch.dot(values, values).item()
    distances = squares - total * mean
    if distances < _CANCELLATION * squares or not math.isfinite(squares):
        off = values.double() - mean
        return torch.dot(off, off).item()
    return distances


def _table(rows: list[Row], device: torch.device) -> Tensor:
    if not isinstance(rows[0][_FINITE], Tensor):
        return torch.tensor(rows, dtype=torch.float64, device="cpu")
    dtype = widest_float(device)
    columns = [
        torch.stack(values).to(dtype)
        if isinstance(values[0], Tensor)
        else _to_device(values, dtype, device)
        for values in zip(*rows, strict=True)
    ]
    return torch.stack(columns, dim=1)


def _to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _merged(table: Tensor, ids: Tensor, modules: int) -> Tensor:

    def add(column: Tensor) -> Tensor:
        return column.new_zeros(modules).index_add(0, ids, column)

    def extreme(column: Tensor, reduction: str, initial: float) -> Tensor:
        return column.new_full((modules,), initial).scatter_reduce(0, ids, column, reduction)

    size, finite, mean, squares, low, high, nonzero = table.unbind(1)
    mean = torch.where(finite > 0, mean, 0)  # without values it is NaN
    squares = torch.where(finite > 0, squares, 0)
    all_finite = add(finite)
    all_mean = add(finite * mean) / all_finite.clamp(min=1)
    distance = mean - all_mean[ids]
    return torch.stack(
        [
            add(size),
            all_finite,
            all_mean,
            add(squares + finite * distance.square()),
            extreme(low, "amin", math.inf),
            extreme(high, "amax", -math.inf),
            add(nonzero),
        ],
        dim=1,
    )


def _totals(row: Sequence[float]) -> Totals:
    size, finite, mean, squares, low, high, nonzero = row
    if not finite:
        mean = low = high = math.nan
    return Totals(int(size), int(finite), mean, squares, low, high, int(nonzero))


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
        self._half = bins * (_HIGH_POWER - _LOW_POWER)

    def add(self, name: str, tensor: Tensor) -> None:
        """Count the values of a tensor, without waiting for the device."""
        values = tensor.detach().reshape(-1)
        # In float32 the logarithm of a value next to an edge equals that of the edge.
        values = values.to(widest_float(values.device))
        clean = values.nan_to_num(0.0, 0.0, 0.0)
        index = clean.abs().log2_().mul_(self._bins).floor_().sub_(_LOW_POWER * self._bins)
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
            return -math.exp2(_HIGH_POWER - i / self._bins)
        return math.exp2(_LOW_POWER + (i - self._half - 1) / self._bins)


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
