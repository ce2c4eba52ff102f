"""The norm of tensors over all ranks that have parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.device_numbers import widest_float
from hookline.tensors.sharded import is_sharded, local_with_groups, stored_values


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all values together, as `torch.nn.utils.get_total_norm` does.

    For sharded tensors this is one collective for all tensors on a device mesh, which all ranks
    have to call. A norm of `DTensor`s that torch computes would be another for each reading of it.
    """
    if _are_alike(tensors):  # the calls of `get_total_norm`, without its checks
        norms = torch._foreach_norm([*tensors])  # pyright: ignore[reportPrivateImportUsage]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    with torch.no_grad():
        return _sharded_norm(tensors) if any(map(is_sharded, tensors)) else _local_norm(tensors)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Return whether these are plain tensors without a graph, of one kind and on one device."""
    if not tensors:
        return False
    dtype, device = tensors[0].dtype, tensors[0].device
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.requires_grad or tensor.layout is not torch.strided:
            return False
        if tensor.dtype is not dtype or tensor.device != device:
            return False
    return True


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
