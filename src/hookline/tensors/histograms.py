"""Histograms with the same bins for all tensors, so that counts can be added, and percentiles.

Each doubling of the magnitude from 2**-64 to 2**32 is divided into 32 bins of equal width, for each
sign: the upper bits of a float32 are the number of its bin. Smaller magnitudes are in the bin of
zero, larger ones in the outermost bins. Values that are not finite are not counted. What is shown
has 4 bins for each doubling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.device_numbers import widest_float

_LOWEST, _HIGHEST = -64, 32  # powers of two
_PER_DOUBLING, _SHOWN_PER_DOUBLING = 32, 4
_DISCARDED_BITS = 18  # of a float32: all but its exponent and five bits of its mantissa
_HALF = (_HIGHEST - _LOWEST) * _PER_DOUBLING  # bins of each sign
_SHOWN_HALF = (_HIGHEST - _LOWEST) * _SHOWN_PER_DOUBLING


def count_values(tensor: Tensor) -> Tensor:
    """Return the counts of a tensor's values in the narrow bins, without waiting for the device."""
    total = torch.zeros(2 * _HALF + 3, dtype=torch.int64, device=tensor.device)
    for piece in pieces_of(tensor):
        values = piece.float()
        bits = values.view(torch.int32)
        bins = (bits & 0x7FFFFFFF) >> _DISCARDED_BITS
        bins = (bins - ((127 + _LOWEST) * _PER_DOUBLING - 1)).clamp_(0, _HALF)
        bins = bins.masked_fill_(~values.isfinite(), _HALF + 1)
        bins = bins.mul_((bits >> 31).bitwise_or_(1)).add_(_HALF + 1)
        if bins.device.type == "cpu":
            total += torch.bincount(bins, minlength=len(total))  # elsewhere it would wait
        else:
            total.scatter_add_(0, bins.long(), torch.ones_like(bins, dtype=torch.int64))
    return total[1:-1]


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the values in pieces: they bound the memory of results, and fit into a CPU's cache."""
    size = 1 << 17 if tensor.device.type == "cpu" else 1 << 22
    return torch.split(tensor.detach().reshape(-1), size)


def merge_bins(counts: Tensor) -> Tensor:
    """Return counts in the wide bins that are shown; the last dimension is that of the bins."""
    width = _PER_DOUBLING // _SHOWN_PER_DOUBLING
    negative, zero, positive = counts.split([_HALF, 1, _HALF], -1)
    shown = [half.unflatten(-1, (-1, width)).sum(-1) for half in (negative, positive)]
    return torch.cat([shown[0], zero, shown[1]], -1)


def describe_histogram(counts: Sequence[float]) -> dict[str, Any]:
    """Return counts in wide bins with their edges.

    Empty bins at the ends are omitted; adjacent empty bins elsewhere are merged into one.
    """
    filled = [i for i, count in enumerate(counts) if count] or [_SHOWN_HALF]
    shown: list[int] = []
    edges = [_lower_edge(filled[0])]
    for i in range(filled[0], filled[-1] + 1):
        if shown and not counts[i] and not shown[-1]:
            edges.pop()
        else:
            shown.append(int(counts[i]))
        edges.append(_lower_edge(i + 1))
    return {"counts": shown, "edges": edges}


def _lower_edge(i: int) -> float:
    number = i - _SHOWN_HALF - 1 if i > _SHOWN_HALF else _SHOWN_HALF - i
    doublings, place = divmod(number, _SHOWN_PER_DOUBLING)
    edge = math.ldexp(1 + place / _SHOWN_PER_DOUBLING, _LOWEST + doublings)
    return edge if i > _SHOWN_HALF else -edge


def estimate_percentiles(counts: Tensor, wanted: Sequence[float]) -> Tensor:
    """Return percentiles of the values that were counted: a row for each row of counts.

    They are interpolated as in `torch.quantile`, between two values that are exact to 2 %.
    """
    cumulative = counts.cumsum(1)
    number = cumulative[:, -1]
    last = (number - 1).clamp(min=0).to(widest_float(counts.device))
    centers = _bin_centers(counts.device)

    def value_at(rank: Tensor) -> Tensor:
        bins = torch.searchsorted(cumulative, rank.to(torch.int64)[:, None], right=True)
        return centers[bins[:, 0].clamp(max=2 * _HALF)]

    found: list[Tensor] = []
    for percentile in wanted:
        position = last * (percentile / 100)
        below = position.floor()
        above = torch.minimum(below + 1, last)
        found.append(torch.lerp(value_at(below), value_at(above), position - below))
    return torch.stack(found, 1).masked_fill(number[:, None] == 0, torch.nan)


@lru_cache(maxsize=8)
def _bin_centers(device: torch.device) -> Tensor:
    places = torch.arange(_HALF, dtype=torch.float64)
    doublings = (places / _PER_DOUBLING).floor() + _LOWEST
    centers = (1 + (places % _PER_DOUBLING + 0.5) / _PER_DOUBLING) * doublings.exp2()
    return torch.cat([-centers.flip(0), torch.zeros(1), centers]).to(device, widest_float(device))
