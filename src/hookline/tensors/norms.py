"""The norm of tensors over all ranks that have parts of them, and values that are not finite.

Whether values are finite, large or all zero follows from the smallest and the largest one, which
take one pass: on a CPU that is nine times as fast as `isfinite().all()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.tensors.device_numbers import read_tensors, widest_float
from hookline.tensors.sharded import (
    is_sharded,
    local_with_groups,
    needs_collective,
    stored_values,
)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all values together, as `torch.nn.utils.get_total_norm` does.

    For sharded tensors this is one collective for all tensors on a device mesh, which all ranks
    have to call. A norm of `DTensor`s that torch computes would be another for each reading of it.
    """
    if not tensors:
        return torch.tensor(0.0)
    dtype, device = tensors[0].dtype, tensors[0].device
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.requires_grad:
            break
        if tensor.dtype is not dtype or tensor.device != device:
            break
    else:  # the calls of `get_total_norm`, without its checks
        norms = torch._foreach_norm([*tensors])  # pyright: ignore[reportPrivateImportUsage]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    with torch.no_grad():
        return _sharded_norm(tensors) if any(map(is_sharded, tensors)) else _local_norm(tensors)


def _sharded_norm(tensors: Sequence[Tensor]) -> Tensor:
    parts: dict[tuple[Any, ...], list[Tensor]] = {}  # by the groups that have the other parts
    for tensor in tensors:
        part, groups = local_with_groups(tensor) if is_sharded(tensor) else (tensor, ())
        parts.setdefault(groups, []).append(part)
    squares: list[Tensor] = []
    for groups, local in parts.items():
        norm = _local_norm(local)
        squares.append(reduce_sum(norm.to(widest_float(norm.device)).square(), groups))
    home = squares[0].device
    total = torch.stack([square.to(home) for square in squares]).sum().sqrt()
    return total.to(torch.float64 if tensors[0].dtype == torch.float64 else torch.float32)


def reduce_sum(value: Tensor, groups: Sequence[Any]) -> Tensor:
    """Add up a tensor, in place, over the ranks of these process groups."""
    for group in groups:
        torch.distributed.all_reduce(value, group=group)
    return value


def _local_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm as torch does, unseen by listeners to the loop's own calls."""
    get_total_norm = torch.nn.utils.get_total_norm
    compute = getattr(get_total_norm, "__wrapped__", get_total_norm)
    # The rows of a sparse gradient that are the same row of the weight have to be added up first.
    values = [stored_values(tensor) if tensor.is_sparse else tensor for tensor in tensors]
    norm: Tensor = compute(values)
    return norm


# -- values that are not finite --------------------------------------------------------------------


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
    one is not finite the values are checked themselves. Of sharded tensors this rank's shard is
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
    """Return the names of the tensors that have a NaN or Inf, in this rank's shard."""
    named = list(named)
    flags = _are_nonfinite([stored_values(tensor) for _, tensor in named])
    return [name for (name, _), is_nonfinite in zip(named, flags, strict=True) if is_nonfinite]


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or Inf, and how many of them it has.

    Of a sharded tensor this rank's shard is looked at, and the text says so.
    """
    named = list(named)
    flags = _are_nonfinite([stored_values(tensor) for _, tensor in named])
    found = next((pair for pair, flag in zip(named, flags, strict=True) if flag), None)
    if found is None:
        return None
    name, tensor = found
    values = stored_values(tensor)
    where = f" in the part of rank {dist.get_rank()}" if needs_collective(tensor) else ""
    values = torch.view_as_complex(values) if tensor.is_complex() else values
    nans, infinite = values.isnan().sum(), values.isinf().sum()
    return f"'{name}' ({int(nans)} NaN and {int(infinite)} Inf of {values.numel()}{where})"


def _are_nonfinite(tensors: list[Tensor]) -> list[bool]:
    measured = [extremes(tensor) or () for tensor in tensors]
    numbers = iter(read_tensors(extreme for pair in measured for extreme in pair))
    ranges = [[next(numbers) for _ in pair] for pair in measured]
    return [not all(map(math.isfinite, pair)) for pair in ranges]
