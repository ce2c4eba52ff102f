"""Statistics of many tensors at once, such as all gradients of an optimizer.

Every function returns tensors on the device with one row per tensor, so that they can be copied to
the CPU together. A sharded tensor (a `DTensor`) is measured by each rank in the part that it
holds, and the columns of several measurements are merged by one collective, `merge_ranks`, which
all ranks have to call.

Large tensors are measured in pieces. That bounds the memory for temporary results, keeps a CPU
within its cache, and keeps counts in float32 exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.device_numbers import widest_float
from hookline.tensors.norms import reduce_sum
from hookline.tensors.sharded import is_sharded, local_with_groups, stored_values

_OCTAVES = 24  # the range below the largest magnitude that percentiles resolve
_PER_OCTAVE = 64
_TOP = _OCTAVES * _PER_OCTAVE + 1  # the fine bin of the largest magnitude; that of zero is 0

_PLAIN = (Tensor, torch.nn.Parameter)
Measure = Callable[[Tensor], list[Tensor]]


Columns = dict[str, Tensor]
"""Measurements by name, each with one row per tensor. Of the finite values: `finite` (how many),
`mean`, `squares` (the sum of squared distances from the mean), `largest` (the largest magnitude)
and `zeros` (how many). All others are norms."""


class TensorStatistics:
    """Measures several tensors, in the parts that this rank has.

    The tensors may be dense, sparse or sharded, and of any floating-point type.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.local = list(tensors)
        """The dense values of each tensor that this rank holds."""
        self.groups: dict[tuple[Any, ...], list[int]] = {}
        """The rows of sharded tensors, by the process groups that have their other parts."""
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
                self.groups.setdefault(groups, []).append(row)
        self.local[row] = stored_values(tensor.to_dense() if tensor.is_sparse else tensor)

    @property
    def home(self) -> torch.device:
        """The device on which results are collected."""
        return self.local[0].device

    def sizes(self) -> list[int]:
        """Return the number of elements of each tensor, on all ranks together."""
        return [_real_numel(tensor) for tensor in self._tensors]

    def norms(self) -> Tensor:
        """Return the 2-norm of each tensor; half precision is computed in float32."""
        return _norms(self.local, self.home)

    @torch.no_grad()
    def moments(self) -> Columns:
        """Return the moments of each tensor's finite values."""
        rows = [_by_piece(tensor, _first_pass, largest_at=1) for tensor in self.local]
        sums, largest, nonzero, finite = _columns(rows, self.home)
        mean = sums / finite.clamp(min=1)
        # A second pass: the mean square less the square of the mean would be noise where the mean
        # is much larger than the deviation.
        pairs = zip(self.local, mean, strict=True)
        deviations = [_by_piece(tensor, partial(_deviation, center)) for tensor, center in pairs]
        squares = _columns(deviations, self.home)[0]
        names = ("finite", "mean", "squares", "largest", "zeros")
        values = (finite, mean, squares, largest, finite - nonzero)
        return dict(zip(names, values, strict=True))

    @torch.no_grad()
    def distributions(
        self, moments: Columns, bins: int, percentiles: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Return histograms and percentiles of each tensor, over all ranks.

        A histogram has counts in bins of equal width from minus to plus the largest magnitude of
        all ranks. If tensors are sharded, this is one collective.
        """
        counts: list[Tensor] = []
        if bins:
            counts.append(self._histograms(moments["largest"], bins))
        if percentiles:
            counts.append(self._count(moments["largest"], _fine_bins, 2 * _TOP + 3)[:, 1:-1])
        joined = torch.cat(counts, 1)
        for groups, rows in self.groups.items():
            joined[rows] = reduce_sum(joined[rows], groups)
        fine = joined[:, bins:] if percentiles else joined.new_zeros((len(joined), 1))
        return joined[:, :bins], self._percentiles(moments, fine, percentiles)

    def _histograms(self, largest: Tensor, bins: int) -> Tensor:
        counts = self._count(largest, partial(_linear_bins, bins), bins + 2)
        counts[:, bins - 1] += counts[:, bins]  # the largest value itself is on the last edge
        return counts[:, :bins]

    def _percentiles(self, moments: Columns, counts: Tensor, wanted: Sequence[float]) -> Tensor:
        """Return estimated percentiles of the finite values, one column each.

        They are interpolated as in `torch.quantile`, between two values that are exact to 1 %, or
        to one ten-millionth of the tensor's largest magnitude where that is more. This is because
        they come from a histogram with bins that are narrow for small values, not from sorting.
        """
        finite, largest = moments["finite"], moments["largest"]
        cumulative = counts.to(torch.int64).cumsum(1)
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
        if not found:
            return counts.new_zeros((len(counts), 0))
        return torch.stack(found, 1).masked_fill(finite[:, None] == 0, torch.nan)

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


# -- all ranks ------------------------------------------------------------------------------------


@torch.no_grad()
def merge_ranks(measured: Sequence[tuple[TensorStatistics, Columns]]) -> None:
    """Replace columns, which each rank has measured in its own shards, by those of all ranks.

    This is one collective for all columns of sharded tensors with the same device mesh; all ranks
    have to call it. Ranks are merged in their order, so all get the same numbers.
    """
    shared: dict[tuple[Any, ...], list[tuple[Columns, str, list[int]]]] = {}
    for statistics, columns in measured:
        for groups, rows in statistics.groups.items() if columns else ():
            shared.setdefault(groups, []).extend((columns, name, rows) for name in columns)
    for groups, parts in shared.items():
        home = parts[0][0][parts[0][1]].device
        for group in groups:
            own = torch.cat(
                [columns[name][rows].to(home, widest_float(home)) for columns, name, rows in parts]
            )
            size = torch.distributed.get_world_size(group)
            gathered = own.new_empty((size, *own.shape))
            _all_gather(gathered.view(-1), own, group=group)
            _merge_parts(parts, gathered)


def _all_gather(output: Tensor, own: Tensor, group: Any) -> None:
    is_new = hasattr(torch.distributed, "all_gather_single")  # since torch 2.13
    name = "all_gather_single" if is_new else "all_gather_into_tensor"
    getattr(torch.distributed, name)(output, own, group=group)


def _merge_parts(parts: list[tuple[Columns, str, list[int]]], gathered: Tensor) -> None:
    """Write what was gathered, a row for each rank, into the columns."""
    pieces = gathered.split([len(rows) for _, _, rows in parts], 1)
    of_ranks: dict[tuple[int, tuple[int, ...]], Columns] = {}  # by columns and rows
    for (columns, name, rows), piece in zip(parts, pieces, strict=True):
        of_ranks.setdefault((id(columns), tuple(rows)), {})[name] = piece
    for columns, name, rows in parts:
        ranks = of_ranks[id(columns), tuple(rows)]
        column = columns[name] = columns[name].to(gathered.dtype)
        column[rows] = _merge_column(name, ranks).to(column.device)


def _merge_column(name: str, ranks: Columns) -> Tensor:
    """Return a column of all ranks together, from those of each rank."""
    column = ranks[name]
    if name == "largest":
        return column.amax(0)
    if name in ("finite", "zeros"):
        return column.sum(0)
    if name not in ("mean", "squares"):
        return column.square().sum(0).sqrt()
    # With the formula of Chan, Golub and LeVeque.
    finite, means = ranks["finite"], ranks["mean"]
    mean = (finite * means).sum(0) / finite.sum(0).clamp(min=1)
    if name == "mean":
        return mean
    return (column + finite * (means - mean).square()).sum(0)


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
