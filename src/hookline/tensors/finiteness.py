"""Finding values that are not finite.

Whether values are finite, large or all zero follows from the smallest and the largest one, which
take one pass: on a CPU that is nine times as fast as `isfinite().all()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.global_norm import reduce_sum
from hookline.tensors.sharded import (
    is_sharded,
    local_with_groups,
    needs_collective,
    stored_values,
)


@torch.no_grad()
def extremes(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the smallest and the largest value as tensors on the device.

    Both are NaN if one value is. A sharded tensor is measured on this rank only. Returns None for
    integers, empty and meta tensors, and layouts other than strided and COO.
    """
    tensor = stored_values(tensor)
    is_measurable = tensor.layout is torch.strided and tensor.is_floating_point()
    if not is_measurable or not tensor.numel() or tensor.is_meta:
        return None
    if tensor.element_size() == 1:  # few operations support 8-bit floats
        tensor = tensor.to(torch.bfloat16)
    low, high = torch.aminmax(tensor)
    return low, high


def all_finite(tensors: Iterable[Tensor], *, on_all_ranks: bool = False) -> bool:
    """Return whether all values are finite. This waits for the device once.

    It computes norms, for all tensors in one call. A norm can overflow where no value does, so if
    one is not finite the values are checked themselves. Of sharded tensors this rank's part is
    checked; with `on_all_ranks` all parts, by one collective that all ranks have to call.
    """
    tensors = list(tensors)
    finite = _are_finite(tensors)
    if not on_all_ranks:
        return finite
    sharded = [local_with_groups(tensor) for tensor in tensors if is_sharded(tensor)]
    for groups in dict.fromkeys(groups for _, groups in sharded if groups):
        nonfinite = torch.tensor(float(not finite), device=sharded[0][0].device)
        finite = not reduce_sum(nonfinite, groups).item()
    return finite


def _are_finite(tensors: list[Tensor]) -> bool:
    stored = map(stored_values, tensors)
    values = [values for values in stored if values.numel() and values.is_floating_point()]
    if not values:
        return True
    norms = torch._foreach_norm(values)  # pyright: ignore[reportPrivateImportUsage]
    home = norms[0].device
    joined = torch.stack([norm if norm.device == home else norm.to(home) for norm in norms])
    return bool(joined.isfinite().all()) or not any(_are_nonfinite(values))


def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that have a NaN or Inf, in this rank's part."""
    named = list(named)
    flags = _are_nonfinite([stored_values(tensor) for _, tensor in named])
    return [name for (name, _), is_nonfinite in zip(named, flags, strict=True) if is_nonfinite]


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or Inf, and how many of them it has.

    Of a sharded tensor this rank's part is looked at, and the text says so.
    """
    named = list(named)
    pairs = [(name, stored_values(tensor), tensor.is_complex()) for name, tensor in named]
    flags = _are_nonfinite([values for _, values, _ in pairs])
    for (name, values, is_complex), is_nonfinite, (_, tensor) in zip(
        pairs, flags, named, strict=True
    ):
        if is_nonfinite:
            where = f" in the part of rank {dist.get_rank()}" if needs_collective(tensor) else ""
            values = torch.view_as_complex(values) if is_complex else values
            nans, infinite = values.isnan().sum(), values.isinf().sum()
            return f"'{name}' ({int(nans)} NaN and {int(infinite)} Inf of {values.numel()}{where})"
    return None


def _are_nonfinite(tensors: list[Tensor]) -> list[bool]:
    measured = [extremes(tensor) or () for tensor in tensors]
    numbers = iter(read_tensors(extreme for pair in measured for extreme in pair))
    ranges = [[next(numbers) for _ in pair] for pair in measured]
    return [not all(map(math.isfinite, pair)) for pair in ranges]
