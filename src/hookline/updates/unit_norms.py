"""The norms of the units of tensors: the rows of a matrix, the filters of a convolution, a vector.

The units of a sharded tensor may be divided among ranks: a vector always is, a row if the tensor is
sharded along another dimension than the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.global_norm import reduce_sum
from hookline.tensors.sharded import is_sharded, local

__all__ = ["unit_norms"]


def unit_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of the units that this rank has a part of, for each tensor.

    Norms of divided units are reduced by one collective, which all ranks have to call.
    """
    norms = [_local_norms(local(tensor)) for tensor in tensors]
    divided: dict[tuple[Any, ...], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if groups := _groups_of_units(tensor):
            divided.setdefault(groups, []).append(i)
    for groups, positions in divided.items():
        squares = torch.cat([norms[i].flatten() for i in positions]).square()
        parts = reduce_sum(squares, groups).sqrt().split([norms[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            norms[i] = part.view(norms[i].shape)
    return norms


def _groups_of_units(tensor: Any) -> tuple[Any, ...]:
    """Return the process groups among which the units of a tensor are divided."""
    if not is_sharded(tensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, place in enumerate(tensor.placements)
        if mesh.size(dim) > 1
        and not place.is_replicate()
        and (tensor.ndim < 2 or not place.is_shard(0))
    )


def _local_norms(tensor: Tensor) -> Tensor:
    dims = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
    return norms
