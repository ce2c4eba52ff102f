"""Numbers about many gradients, computed where they are and not read.

Everything here returns tensors on the device, one row per gradient, so that whoever wants to see
them copies them once. A sharded gradient (a DTensor) is measured by each rank in the part that it
holds, and the ranks add up: every rank has to call the same functions.

Large gradients are measured in pieces. That bounds what is allocated meanwhile, keeps a CPU within
its cache, and keeps counts in single precision exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.sharded import is_sharded

__all__ = ["Parts", "Statistics", "histograms", "percentiles", "statistics", "wide"]

_OCTAVES = 24  # how far below the largest magnitude percentiles tell values apart
_PER_OCTAVE = 64
_TOP = _OCTAVES * _PER_OCTAVE + 1  # the fine bin of the largest magnitude; that of zero is 0

_PLAIN = (Tensor, torch.nn.Parameter)
Measure = Callable[[Tensor], list[Tensor]]


class Parts:
    """Tensors as this rank holds them, and how numbers about them become those of the whole.

    Args:
        tensors: gradients or weights; dense, sparse or sharded, of any floating type.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._given = tensors
        self.local = list(tensors)
        self._groups: dict[tuple[Any, ...], list[int]] = {}
        self._unstored: list[int] = []
        for row, tensor in enumerate(self.local):
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                self._take_special(row, tensor)
            elif tensor.is_complex():
                self.local[row] = torch.view_as_real(tensor)

    def _take_special(self, row: int, tensor: Tensor) -> None:
        """Take a tensor that is sharded or sparse, as this rank's dense part of it."""
        if is_sharded(tensor):
            tensor, groups = _local(tensor)
            if groups:
                self._groups.setdefault(groups, []).append(row)
        if tensor.layout is torch.sparse_coo:
            stored = tensor.coalesce().values()
            self._unstored = self._unstored or [0] * len(self.local)
            self._unstored[row] = tensor.numel() - stored.numel()
            tensor = stored
        self.local[row] = tensor

    def sizes(self) -> list[int]:
        """How many elements each has, on all ranks together."""
        return [one.numel() * (2 if one.is_complex() else 1) for one in self._given]

    @property
    def home(self) -> torch.device:
        """Where numbers about them are collected."""
        return self.local[0].device

    def norms(self) -> Tensor:
        """The norm of each; of half precision too, it is computed in single precision."""
        norms = _norms(self.local, self.home)
        if not self._groups:
            return norms
        return self.whole(norms.to(wide(self.home)).square()).sqrt()

    def whole(self, rows: Tensor, *, largest: bool = False) -> Tensor:
        """Turn sums (or largest values) over what this rank holds into those over everything."""
        for groups, numbers in self._groups.items():
            part = rows if len(numbers) == len(rows) else rows[numbers]
            for group in groups:
                operation = torch.distributed.ReduceOp
                torch.distributed.all_reduce(
                    part, operation.MAX if largest else operation.SUM, group=group
                )
            if part is not rows:
                rows[numbers] = part
        return rows

    def unstored_zeros(self) -> Tensor | float:
        """How many zeros of each are not stored, on the device where there are any."""
        if not self._unstored:
            return 0.0
        return torch.tensor(self._unstored, dtype=wide(self.home), device=self.home)


@dataclass
class Statistics:
    """One row per gradient. Values that are not finite are left out of all of them."""

    finite: Tensor
    mean: Tensor
    std: Tensor
    largest: Tensor
    zeros: Tensor


@torch.no_grad()
def statistics(parts: Parts) -> Statistics:
    """Measure mean, standard deviation (of the elements, not of a sample), and extremes."""
    looks = [_by_piece(one, _first_look, largest_at=1) for one in parts.local]
    sums, largest, nonzero, finite = _columns(looks, parts.home)
    unstored = parts.unstored_zeros()
    largest = parts.whole(largest, largest=True)
    sums, nonzero, finite = (parts.whole(one) for one in (sums, nonzero, finite + unstored))
    counted = finite.clamp(min=1)
    mean = sums / counted
    # A second pass: the mean square less the square of the mean would be noise where the mean is
    # much larger than the deviation.
    deviations = [
        _by_piece(one, partial(_deviation, mean[row])) for row, one in enumerate(parts.local)
    ]
    squares = parts.whole(_columns(deviations, parts.home)[0] + unstored * mean.square())
    return Statistics(finite, mean, (squares / counted).sqrt(), largest, finite - nonzero)


@torch.no_grad()
def histograms(parts: Parts, largest: Tensor, bins: int) -> Tensor:
    """Count in bins of equal width between minus and plus the largest magnitude, a row each."""
    counts = _counted(parts, largest, partial(_linear_bins, bins), bins + 2)
    counts[:, bins - 1] += counts[:, bins]  # the largest value itself stands on the last edge
    counts[:, bins // 2] += parts.unstored_zeros()
    return parts.whole(counts[:, :bins].contiguous())


@torch.no_grad()
def percentiles(parts: Parts, finite: Tensor, largest: Tensor, wanted: Sequence[float]) -> Tensor:
    """Estimate percentiles (0 to 100) of each gradient's finite values, a row each.

    They are interpolated as in `torch.quantile`, between two values that are known to 1 %, or to
    one ten-millionth of the gradient's largest magnitude where that is more. This is because they
    come from a histogram whose bins are narrow where values are small, not from sorting.
    """
    counts = _counted(parts, largest, _fine_bins, 2 * _TOP + 3)[:, 1:-1].contiguous()
    counts[:, _TOP] += parts.unstored_zeros()
    reached = parts.whole(counts).to(torch.int64).cumsum(1)
    last = (finite - 1).clamp(min=0)
    middles = _middles(parts.home)

    def ranked(rank: Tensor) -> Tensor:
        bins = torch.searchsorted(reached, rank.to(torch.int64)[:, None], right=True)
        return middles[bins[:, 0].clamp(max=2 * _TOP)]

    found: list[Tensor] = []
    for share in wanted:
        position = last * (share / 100)
        below = position.floor()
        above = torch.minimum(below + 1, last)
        found.append(torch.lerp(ranked(below), ranked(above), position - below) * largest)
    return torch.stack(found, 1).masked_fill(finite[:, None] == 0, torch.nan)


def wide(device: torch.device) -> torch.dtype:
    """The widest floating type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


# -- parts of tensors -----------------------------------------------------------------------------


def _local(tensor: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Return what this rank holds of a DTensor, and the groups that hold the rest of it."""
    from torch.distributed.tensor import Replicate

    if any(one.is_partial() for one in tensor.placements):
        tensor = tensor.redistribute(
            placements=[Replicate() if one.is_partial() else one for one in tensor.placements]
        )
    mesh = tensor.device_mesh
    groups = tuple(
        mesh.get_group(dim) for dim, one in enumerate(tensor.placements) if not one.is_replicate()
    )
    return tensor.to_local(), groups


def _norms(tensors: list[Tensor], home: torch.device) -> Tensor:
    dtype = tensors[0].dtype
    if all(tensor.dtype is dtype and tensor.device == home for tensor in tensors):
        return torch.stack(_norms_of_a_kind(tensors))
    kinds: dict[tuple[Any, Any], list[int]] = {}
    for row, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(row)
    norms: list[Any] = [None] * len(tensors)  # foreach is one kernel only within a kind
    for rows in kinds.values():
        found = torch.stack(_norms_of_a_kind([tensors[row] for row in rows]))
        for row, norm in zip(rows, found.to(home, wide(home)).unbind(), strict=True):
            norms[row] = norm
    return torch.stack(norms)


def _norms_of_a_kind(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    double = tensors[0].dtype == torch.float64
    kind = torch.float64 if double else torch.float32
    return torch._foreach_norm(tensors, 2, kind)  # pyright: ignore[reportPrivateImportUsage]


# -- piece by piece -------------------------------------------------------------------------------


def _by_piece(tensor: Tensor, measure: Measure, largest_at: int | None = None) -> list[Tensor]:
    """Measure the pieces of a tensor and add up; of the column `largest_at` keep the largest."""
    found = [measure(_single(piece)) for piece in _pieces(tensor)]
    if len(found) == 1:
        return found[0]
    return [
        torch.stack(column).amax() if number == largest_at else _sum(column)
        for number, column in enumerate(zip(*found, strict=True))
    ]


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).to(wide(values[0].device)).sum()


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    size = 1 << 17 if tensor.device.type == "cpu" else 1 << 22
    return torch.split(tensor.detach().reshape(-1), size)


def _single(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _columns(rows: list[list[Tensor]], home: torch.device) -> list[Tensor]:
    kind = wide(home)
    return [
        torch.stack([one.to(home, kind) for one in column]) for column in zip(*rows, strict=True)
    ]


def _first_look(values: Tensor) -> list[Tensor]:
    """The sum, the largest magnitude, and how many are not zero, and finite."""
    if not values.numel():  # a rank may hold nothing of a sharded gradient
        return [values.new_zeros(())] * 4
    clean = values.nan_to_num(0, 0, 0)
    low, high = clean.aminmax()
    return [
        clean.sum(),
        torch.maximum(high, -low),
        clean.count_nonzero(),
        (clean == values).sum(),
    ]


def _deviation(mean: Tensor, values: Tensor) -> list[Tensor]:
    """The sum of squared distances from the mean."""
    off = (values - mean.to(values.device, values.dtype)).nan_to_num_(0, 0, 0)
    return [torch.linalg.vector_norm(off).to(wide(values.device)).square()]


# -- counting -------------------------------------------------------------------------------------


def _counted(
    parts: Parts, largest: Tensor, bins_of: Callable[[Tensor], Tensor], bins: int
) -> Tensor:
    """Count each gradient, scaled to at most 1, in the bins that it is told for each element."""
    scale = torch.where(largest > 0, largest, 1)
    rows: list[Tensor] = []
    with _counting():
        for i, one in enumerate(parts.local):
            counts = torch.zeros(bins, dtype=wide(parts.home), device=parts.home)
            for piece in _pieces(one):
                values = _single(piece)
                found = bins_of(values / scale[i].to(values.device, values.dtype))
                counts += _count(found, bins).to(parts.home)
            rows.append(counts)
    return torch.stack(rows)


def _count(found: Tensor, bins: int) -> Tensor:
    if found.device.type == "cpu":
        return torch.bincount(found, minlength=bins)  # elsewhere it would wait for the device
    return torch.histc(found.float(), bins, 0, bins)


def _linear_bins(bins: int, scaled: Tensor) -> Tensor:
    """Bins of equal width, and two more: for the last edge, and for what is not finite."""
    return (scaled + 1).mul_(bins / 2).nan_to_num_(bins + 1, bins + 1, bins + 1).to(torch.int32)


def _fine_bins(scaled: Tensor) -> Tensor:
    """Bins by sign, octave below 1, and place in the octave; what is not finite goes to the ends.

    These are the uppermost bits of a float, as they stand: its exponent, and six of its mantissa.
    """
    bits = scaled.float().view(torch.int32)
    found = (bits & 0x7FFFFFFF) >> 17
    found -= ((127 - _OCTAVES) * _PER_OCTAVE) - 1
    found.clamp_(0, _TOP + 1).mul_((bits >> 31).bitwise_or_(1))
    return found.add_(_TOP + 1)


@lru_cache(maxsize=8)
def _middles(device: torch.device) -> Tensor:
    """The value in the middle of each fine bin, where the largest magnitude is 1."""
    places = torch.arange(_TOP, dtype=torch.float64)
    octaves = (places / _PER_OCTAVE).floor() - _OCTAVES
    middles = (1 + (places % _PER_OCTAVE + 0.5) / _PER_OCTAVE) * octaves.exp2()
    middles[-1] = 1
    return torch.cat([-middles.flip(0), torch.zeros(1), middles]).to(device, wide(device))


@contextmanager
def _counting() -> Generator[None]:
    """Allow `histc` where only deterministic algorithms are: counts are the same in any order."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)
