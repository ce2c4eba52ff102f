"""Statistics of many tensors at once, such as all gradients of an optimizer.

Every function returns tensors on the device with one row per tensor, so that they can be copied to
the CPU together. A sharded tensor (a `DTensor`) is measured by each rank in the part that it
holds, and the columns of several measurements are merged by one collective, `merge_ranks`, which
all ranks have to call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.device_numbers import widest_float
from hookline.tensors.histograms import count_values, pieces_of
from hookline.tensors.norms import reduce_sum
from hookline.tensors.sharded import is_sharded, local_with_groups, stored_values

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
        return [one.numel() * (2 if one.is_complex() else 1) for one in self._tensors]

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
    def counts(self) -> Tensor:
        """Return the histogram of each tensor over all ranks, in the bins of `histograms`.

        For sharded tensors this is a collective.
        """
        counts = torch.stack([count_values(tensor).to(self.home) for tensor in self.local])
        for groups, rows in self.groups.items():
            counts[rows] = reduce_sum(counts[rows], groups)
        return counts


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
    found = [measure(_at_least_float32(piece)) for piece in pieces_of(tensor)]
    if len(found) == 1:
        return found[0]
    columns = [torch.stack(column) for column in zip(*found, strict=True)]
    return [
        column.amax() if number == largest_at else column.to(widest_float(column.device)).sum()
        for number, column in enumerate(columns)
    ]


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
