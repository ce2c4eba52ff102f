"""Running sums over tensors that come one after another: what they amount to all together.

On the CPU a tensor is summed up in pieces that fit into a cache, and what comes out are plain
numbers. On other devices it becomes a few tensors with one element, and nobody waits for them. Both
are kept as rows, and rows are folded into one per module: by the formula of Chan, Golub and LeVeque
for means and squared distances, in double precision where the device has it.

Values that are not finite are counted, and left out of all else.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

__all__ = ["Bounds", "RunningSums", "Totals", "wide"]

Bounds: TypeAlias = tuple[float, float] | None
"""The smallest and the largest value that a module can give, where that is known."""

Row: TypeAlias = list[Any]
"""For each column a number, or a tensor with one element that nobody has read."""

_COLUMNS = ("size", "finite", "mean", "squares", "low", "high", "nonzero", "saturated")
_SIZE, _FINITE, _MEAN, _SQUARES, _LOW, _HIGH, _NONZERO, _SATURATED = range(len(_COLUMNS))

_PIECE = 1 << 17  # elements that are measured at once on the CPU
_MANY = 4096  # rows that are kept before they are folded
_EXACT = 0.1  # squared distances are less than this of the squares: take them in double precision


@dataclass(frozen=True)
class Totals:
    """What the values of one module amount to. The number of `size` is of all, zeros too.

    `mean`, `squares` (summed squared distances from the mean), `low`, `high` and `saturated` are
    of the finite ones.
    """

    size: int
    finite: int
    mean: float
    squares: float
    low: float
    high: float
    nonzero: int
    saturated: int

    @property
    def std(self) -> float:
        """The standard deviation of the values themselves, not an estimate for others."""
        return math.sqrt(max(self.squares, 0.0) / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The 2-norm."""
        return math.sqrt(max(self.squares, 0.0) + self.finite * self.mean**2)


class RunningSums:
    """Sums over what each of several modules gives. Threads may add at the same time.

    Args:
        spread: whether squared distances are summed, for `std` and `norm`.
        extremes: whether smallest and largest values are looked for.
        zeros: whether zeros are counted.
        saturated_at: count values beyond this share of their bounds; None: do not.
    """

    def __init__(
        self,
        *,
        spread: bool = True,
        extremes: bool = False,
        zeros: bool = False,
        saturated_at: float | None = None,
    ) -> None:
        self._spread, self._extremes, self._zeros = spread, extremes, zeros
        self._saturated_at = saturated_at
        self._rows: deque[tuple[int, torch.device, Row]] = deque()
        self._tables: dict[torch.device, Tensor] = {}
        self._lock = threading.Lock()
        self._last: tuple[Any, int, Bounds, list[Row]] = (_gone, 0, None, [])

    def add(self, number: int, tensor: Tensor, bounds: Bounds = None) -> None:
        """Add a tensor to the sums of the module with this number; nothing waits for the device."""
        rows, device = self._rows_of(tensor, bounds), tensor.device
        for row in rows:
            self._rows.append((number, device, row))
        if len(self._rows) > _MANY:
            self._fold(number + 1)

    def take(self, modules: int) -> Tensor | None:
        """Return the table of all modules, unread, and begin anew; None when nothing was added."""
        self._fold(modules)
        with self._lock:
            tables, self._tables = list(self._tables.values()), {}
        self._last = (_gone, 0, None, [])
        if len(tables) < 2:
            return tables[0] if tables else None
        home = tables[0].device
        ids = [torch.arange(len(table), device=home) for table in tables]
        together = torch.cat([table.to(home, wide(home)) for table in tables])
        return _folded(together, torch.cat(ids), modules)

    @staticmethod
    def read(table: Sequence[Sequence[float]]) -> dict[int, Totals]:
        """Make totals of a table that was brought to the host."""
        return {number: _totals(row) for number, row in enumerate(table) if row[_SIZE]}

    # -- rows -------------------------------------------------------------------------------------

    def _rows_of(self, tensor: Tensor, bounds: Bounds) -> list[Row]:
        """Measure a tensor, unless it is the very one that was measured last.

        A module often returns just what its last child has returned.
        """
        if tensor.is_inference():  # it has no version
            return self._measured(tensor, bounds)
        known, version, limits, rows = self._last
        if known() is tensor and version == tensor._version and limits == bounds:
            return rows
        rows = self._measured(tensor, bounds)
        self._last = (ref(tensor), tensor._version, bounds, rows)
        return rows

    def _measured(self, tensor: Tensor, bounds: Bounds) -> list[Row]:
        size = tensor.numel()
        if not size:
            return []
        values = tensor.detach().reshape(-1)
        if not _reads_at_once(tensor.device):
            return [self._on_device(values, bounds)]
        pieces = (values,) if size <= _PIECE else torch.split(values, _PIECE)
        middle, reach = 0.0, 0.0
        if self._saturated_at is not None:
            middle, reach = _reach(pieces, bounds, self._saturated_at)
        return [self._on_host(piece, middle, reach) for piece in pieces]

    def _on_host(self, values: Tensor, middle: float, reach: float) -> Row:
        """Measure values where reading costs nothing: look first, and take pains where needed."""
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
        if self._saturated_at is not None:
            beyond = (kept - middle).abs_() > reach
            row[_SATURATED] = torch.count_nonzero(beyond).item()
        return row

    def _on_device(self, values: Tensor, bounds: Bounds) -> Row:
        """Measure values without looking at them: the host does not wait."""
        row = _empty(values.numel())
        if self._zeros:
            row[_NONZERO] = torch.count_nonzero(values)
        values = values if values.dtype in _SUMMED else values.float()
        clean = values.nan_to_num(0.0, 0.0, 0.0)
        is_finite = clean == values
        row[_FINITE] = finite = torch.count_nonzero(is_finite)
        row[_MEAN] = mean = clean.sum() / finite
        if self._spread:  # what is left out stands at the mean, where it adds nothing
            spread = torch.var(torch.where(is_finite, values, mean), correction=0)
            row[_SQUARES] = spread * values.numel()
        if self._extremes:
            row[_LOW] = torch.where(is_finite, values, math.inf).amin()
            row[_HIGH] = torch.where(is_finite, values, -math.inf).amax()
        if self._saturated_at is not None:
            if bounds is None:
                beyond = clean.abs() > clean.abs().amax() * self._saturated_at
            else:
                middle, reach = _bounded(bounds, self._saturated_at)
                beyond = ((clean - middle).abs() > reach) & is_finite
            row[_SATURATED] = torch.count_nonzero(beyond)
        return row

    # -- folding ----------------------------------------------------------------------------------

    def _fold(self, modules: int) -> None:
        """Make one row of all rows of a module, for each device."""
        with self._lock:
            by_device: dict[torch.device, list[tuple[int, Row]]] = {}
            for _ in range(len(self._rows)):  # others may go on adding
                number, device, row = self._rows.popleft()
                by_device.setdefault(device, []).append((number, row))
            for device, rows in by_device.items():
                numbers, values = [number for number, _ in rows], [row for _, row in rows]
                ids, table = _sent(numbers, torch.int64, device), _table(values, device)
                known = self._tables.get(device)
                modules = max(modules, max(numbers) + 1)
                if known is not None:
                    modules = max(modules, len(known))
                    ids = torch.cat([torch.arange(len(known), device=device), ids])
                    table = torch.cat([known, table])
                self._tables[device] = _folded(table, ids, modules)


_SUMMED = (torch.float32, torch.float64)  # types that are summed as they are


def wide(device: torch.device) -> torch.dtype:
    """The widest floating type there; Apple's devices have no double precision."""
    return torch.float32 if device.type == "mps" else torch.float64


def _reads_at_once(device: torch.device) -> bool:
    """Whether a value can be read without waiting for anything."""
    return device.type == "cpu"


def _gone() -> None:
    """Stands for a reference to a tensor that is no more."""


def _empty(size: int) -> Row:
    return [size, 0, 0.0, 0.0, math.inf, -math.inf, 0, 0]


def _squares(values: Tensor, total: float, mean: float) -> float:
    """The sum of squared distances from the mean."""
    squares = torch.dot(values, values).item()
    distances = squares - total * mean
    if distances < _EXACT * squares or not math.isfinite(squares):
        off = values.double() - mean
        return torch.dot(off, off).item()
    return distances


def _reach(pieces: Iterable[Tensor], bounds: Bounds, share: float) -> tuple[float, float]:
    """The middle, and the distance from it beyond which a value is saturated."""
    if bounds is not None:
        return _bounded(bounds, share)
    largest = 0.0
    for piece in pieces:
        high = piece.abs().amax().item()
        if not math.isfinite(high):
            high = piece.nan_to_num(0.0, 0.0, 0.0).abs().amax().item()
        largest = max(largest, high)
    return 0.0, share * largest


def _bounded(bounds: tuple[float, float], share: float) -> tuple[float, float]:
    low, high = bounds
    return (low + high) / 2, share * (high - low) / 2


def _table(rows: list[Row], device: torch.device) -> Tensor:
    """Stack rows, on their device."""
    if not isinstance(rows[0][_FINITE], Tensor):
        return torch.tensor(rows, dtype=torch.float64, device="cpu")
    kind = wide(device)
    columns: list[Tensor] = []
    for values in zip(*rows, strict=True):
        if isinstance(values[0], Tensor):
            columns.append(torch.stack(values).to(kind))
        else:
            columns.append(_sent(values, kind, device))
    return torch.stack(columns, dim=1)


def _sent(values: Sequence[Any], kind: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, without waiting for it."""
    tensor = torch.tensor(values, dtype=kind, device="cpu")
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _folded(table: Tensor, ids: Tensor, modules: int) -> Tensor:
    """Fold the rows with the same id into one."""

    def added(column: Tensor) -> Tensor:
        return torch.zeros(modules, dtype=table.dtype, device=table.device).index_add(
            0, ids, column
        )

    size, finite, mean, squares, low, high, nonzero, saturated = table.unbind(1)
    mean = torch.where(finite > 0, mean, 0)  # of nothing, it is none
    squares = torch.where(finite > 0, squares, 0)
    all_finite = added(finite)
    all_mean = added(finite * mean) / all_finite.clamp(min=1)
    away = mean - all_mean[ids]
    return torch.stack(
        [
            added(size),
            all_finite,
            all_mean,
            added(squares + finite * away.square()),
            _extreme(low, ids, modules, "amin", math.inf),
            _extreme(high, ids, modules, "amax", -math.inf),
            added(nonzero),
            added(saturated),
        ],
        dim=1,
    )


def _extreme(column: Tensor, ids: Tensor, modules: int, which: str, none: float) -> Tensor:
    start = torch.full((modules,), none, dtype=column.dtype, device=column.device)
    return start.scatter_reduce(0, ids, column, which)


def _totals(row: Sequence[float]) -> Totals:
    finite = int(row[_FINITE])
    return Totals(
        size=int(row[_SIZE]),
        finite=finite,
        mean=row[_MEAN] if finite else math.nan,
        squares=row[_SQUARES],
        low=row[_LOW] if finite else math.nan,
        high=row[_HIGH] if finite else math.nan,
        nonzero=int(row[_NONZERO]),
        saturated=int(row[_SATURATED]),
    )
