"""Statistics of many tensors at once, such as all gradients of an optimizer.

Every function returns tensors on the device with one row per tensor, so that they can be copied to
the host together. A sharded tensor (a `DTensor`) is measured by each rank in the part that it
holds, and the results are reduced: all ranks have to call the same functions.

Large tensors are measured in pieces. That bounds the memory for temporary results, keeps a CPU
within its cache, and keeps counts in float32 exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.reading import widest_float
from hookline.tensors.sharded import is_sharded, local_with_groups, stored_values

__all__ = ["Moments", "TensorStatistics"]

_OCTAVES = 24  # the range below the largest magnitude that percentiles resolve
_PER_OCTAVE = 64
_TOP = _OCTAVES * _PER_OCTAVE + 1  # the fine bin of the largest magnitude; that of zero is 0

_PLAIN = (Tensor, torch.nn.Parameter)
Measure = Callable[[Tensor], list[Tensor]]


@dataclass
class Moments:
    """Moments of the finite values, one row per tensor."""

    finite: Tensor  # the number of finite values
    mean: Tensor
    std: Tensor  # of the population
    largest: Tensor  # the largest magnitude
    zeros: Tensor  # the number of zeros


class TensorStatistics:
    """Measures several tensors, and reduces the results over the ranks that share them.

    The tensors may be dense, sparse or sharded, and of any floating-point type.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.local = list(tensors)
        """The dense values of each tensor that this rank holds."""
        self._groups: dict[tuple[Any, ...], list[int]] = {}  # rows by process groups
        self._unstored: list[int] = []
        for row, tensor in enumerate(self.local):
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                self._localize(row, tensor)
            elif tensor.is_complex():
                self.local[row] = stored_values(tensor)

    def _localize(self, row: int, tensor: Tensor) -> None:
        """Replace a sharded or sparse tensor by this rank's dense values of it."""
        if is_sharded(tensor):
            tensor, groups = local_with_groups(tensor)
            if groups:
                self._groups.setdefault(groups, []).append(row)
        if tensor.layout is torch.sparse_coo:
            stored = stored_values(tensor)
            self._unstored = self._unstored or [0] * len(self.local)
            self._unstored[row] = _real_numel(tensor) - stored.numel()
            tensor = stored
        self.local[row] = tensor

    @property
    def home(self) -> torch.device:
        """The device on which results are collected."""
        return self.local[0].device

    def sizes(self) -> list[int]:
        """Return the number of elements of each tensor, on all ranks together."""
        return [_real_numel(tensor) for tensor in self._tensors]

    def norms(self) -> Tensor:
        """Return the 2-norm of each tensor; half precision is computed in float32."""
        norms = _norms(self.local, self.home)
        if not self._groups:
            return norms
        return self._reduce(norms.to(widest_float(self.home)).square()).sqrt()

    @torch.no_grad()
    def moments(self) -> Moments:
        """Return mean, standard deviation, largest magnitude and counts of each tensor."""
        rows = [_by_piece(tensor, _first_pass, largest_at=1) for tensor in self.local]
        sums, largest, nonzero, finite = _columns(rows, self.home)
        unstored = self._unstored_zeros()
        largest = self._reduce(largest, largest=True)
        sums, nonzero, finite = map(self._reduce, (sums, nonzero, finite + unstored))
        counted = finite.clamp(min=1)
        mean = sums / counted
        # A second pass: the mean square less the square of the mean would be noise where the mean
        # is much larger than the deviation.
        pairs = zip(self.local, mean, strict=True)
        deviations = [_by_piece(tensor, partial(_deviation, center)) for tensor, center in pairs]
        squares = self._reduce(_columns(deviations, self.home)[0] + unstored * mean.square())
        return Moments(finite, mean, (squares / counted).sqrt(), largest, finite - nonzero)

    @torch.no_grad()
    def histograms(self, largest: Tensor, bins: int) -> Tensor:
        """Return counts in bins of equal width from minus to plus the largest magnitude."""
        counts = self._count(largest, partial(_linear_bins, bins), bins + 2)
        counts[:, bins - 1] += counts[:, bins]  # the largest value itself is on the last edge
        counts[:, bins // 2] += self._unstored_zeros()
        return self._reduce(counts[:, :bins].contiguous())

    @torch.no_grad()
    def percentiles(self, finite: Tensor, largest: Tensor, wanted: Sequence[float]) -> Tensor:
        """Return estimated percentiles (0 to 100) of the finite values, one column each.

        They are interpolated as in `torch.quantile`, between two values that are exact to 1 %, or
        to one ten-millionth of the tensor's largest magnitude where that is more. This is because
        they come from a histogram with bins that are narrow for small values, not from sorting.
        """
        counts = self._count(largest, _fine_bins, 2 * _TOP + 3)[:, 1:-1].contiguous()
        counts[:, _TOP] += self._unstored_zeros()
        cumulative = self._reduce(counts).to(torch.int64).cumsum(1)
        last = (finite - 1).clamp(min=0)
        centers = _bin_centers(self.home)

        def value_at(rank: Tensor) -> Tensor:
            bins = torch.searchsorted(cumulative, rank.to(torch.int64)[:, None], right=True)
            return centers[bins[:, 0].clamp(max=2 * _TOP)]

        found: list[Tensor] = []
        for percentile in wanted:
            position = last * (percentile / 100)
            below = position.floor()
            above = torch.minimum(below + 1, last)
            value = torch.lerp(value_at(below), value_at(above), position - below)
            found.append(value * largest)
        return torch.stack(found, 1).masked_fill(finite[:, None] == 0, torch.nan)

    def _reduce(self, rows: Tensor, *, largest: bool = False) -> Tensor:
        """Turn sums (or largest values) over this rank's values into those over all ranks."""
        for groups, numbers in self._groups.items():
            part = rows if len(numbers) == len(rows) else rows[numbers]
            operations = torch.distributed.ReduceOp
            operation = operations.MAX if largest else operations.SUM
            for group in groups:
                torch.distributed.all_reduce(part, operation, group=group)
            if part is not rows:
                rows[numbers] = part
        return rows

    def _unstored_zeros(self) -> Tensor | float:
        """Return how many zeros of each tensor are not stored, on the device if there are any."""
        if not self._unstored:
            return 0.0
        return torch.tensor(self._unstored, dtype=widest_float(self.home), device=self.home)

    def _count(self, largest: Tensor, bins_of: Callable[[Tensor], Tensor], bins: int) -> Tensor:
        """Count the values of each tensor, scaled to at most 1, in the bins of `bins_of`."""
        scale = torch.where(largest > 0, largest, 1)
        rows: list[Tensor] = []
        with _nondeterministic_counting():
            for row, tensor in enumerate(self.local):
                counts = torch.zeros(bins, dtype=widest_float(self.home), device=self.home)
                for piece in _pieces(tensor):
                    values = _at_least_float32(piece)
                    indices = bins_of(values / scale[row].to(values.device, values.dtype))
                    counts += _bin_counts(indices, bins).to(self.home)
                rows.append(counts)
        return torch.stack(rows)


def _real_numel(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


# -- norms ----------------------------------------------------------------------------------------


def _norms(tensors: list[Tensor], home: torch.device) -> Tensor:
    dtype = tensors[0].dtype
    if all(tensor.dtype is dtype and tensor.device == home for tensor in tensors):
        return _same_type_norms(tensors)
    by_type: dict[tuple[Any, Any], list[int]] = {}
    for row, tensor in enumerate(tensors):
        by_type.setdefault((tensor.device, tensor.dtype), []).append(row)
    norms: list[Any] = [None] * len(tensors)  # foreach is one kernel only within a type
    for rows in by_type.values():
        same_type = _same_type_norms([tensors[row] for row in rows]).to(home, widest_float(home))
        for row, norm in zip(rows, same_type.unbind(), strict=True):
            norms[row] = norm
    return torch.stack(norms)


def _same_type_norms(tensors: list[Tensor]) -> Tensor:
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(foreach_norm(tensors, 2, dtype))


# -- piece by piece -------------------------------------------------------------------------------


def _by_piece(tensor: Tensor, measure: Measure, largest_at: int | None = None) -> list[Tensor]:
    """Measure the pieces of a tensor; add up all columns, but keep the largest of `largest_at`."""
    found = [measure(_at_least_float32(piece)) for piece in _pieces(tensor)]
    if len(found) == 1:
        return found[0]
    columns = [torch.stack(column) for column in zip(*found, strict=True)]
    return [
        column.amax() if number == largest_at else column.to(widest_float(column.device)).sum()
        for number, column in enumerate(columns)
    ]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    size = 1 << 17 if tensor.device.type == "cpu" else 1 << 22
    return torch.split(tensor.detach().reshape(-1), size)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _columns(rows: list[list[Tensor]], home: torch.device) -> list[Tensor]:
    columns = zip(*rows, strict=True)
    dtype = widest_float(home)
    return [torch.stack([value.to(home, dtype) for value in column]) for column in columns]


def _first_pass(values: Tensor) -> list[Tensor]:
    """Return the sum, the largest magnitude, and how many values are nonzero and finite."""
    if not values.numel():  # a rank may hold no part of a sharded tensor
        return [values.new_zeros(())] * 4
    clean = values.nan_to_num(0, 0, 0)
    low, high = clean.aminmax()
    largest = torch.maximum(high, -low)
    return [clean.sum(), largest, clean.count_nonzero(), (clean == values).sum()]


def _deviation(mean: Tensor, values: Tensor) -> list[Tensor]:
    """Return the sum of squared distances from the mean."""
    distances = (values - mean.to(values.device, values.dtype)).nan_to_num_(0, 0, 0)
    return [torch.linalg.vector_norm(distances).to(widest_float(values.device)).square()]


# -- counting -------------------------------------------------------------------------------------


def _bin_counts(indices: Tensor, bins: int) -> Tensor:
    if indices.device.type == "cpu":
        return torch.bincount(indices, minlength=bins)  # elsewhere it would wait for the device
    return torch.histc(indices.float(), bins, 0, bins)


def _linear_bins(bins: int, scaled: Tensor) -> Tensor:
    """Return bins of equal width, and two more: for the last edge and for nonfinite values."""
    return (scaled + 1).mul_(bins / 2).nan_to_num_(bins + 1, bins + 1, bins + 1).to(torch.int32)


def _fine_bins(scaled: Tensor) -> Tensor:
    """Return bins by sign, octave below 1 and place in the octave; nonfinite values at the ends.

    These are the upper bits of a float32: its exponent, and six bits of its mantissa.
    """
    bits = scaled.float().view(torch.int32)
    bins = (bits & 0x7FFFFFFF) >> 17
    bins -= ((127 - _OCTAVES) * _PER_OCTAVE) - 1
    bins.clamp_(0, _TOP + 1).mul_((bits >> 31).bitwise_or_(1))
    return bins.add_(_TOP + 1)


@lru_cache(maxsize=8)
def _bin_centers(device: torch.device) -> Tensor:
    """Return the center of each fine bin, for a largest magnitude of 1."""
    places = torch.arange(_TOP, dtype=torch.float64)
    octaves = (places / _PER_OCTAVE).floor() - _OCTAVES
    centers = (1 + (places % _PER_OCTAVE + 0.5) / _PER_OCTAVE) * octaves.exp2()
    centers[-1] = 1
    return torch.cat([-centers.flip(0), torch.zeros(1), centers]).to(device, widest_float(device))


@contextmanager
def _nondeterministic_counting() -> Generator[None]:
    """Allow `histc` under deterministic algorithms: counts are the same in any order."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
