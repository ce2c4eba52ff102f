"""Sharded, sparse and nested tensors: the whole, this rank's shard, and the stored values."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Shard(NamedTuple):
    """This rank's shard of a sharded tensor, which shares its memory."""

    values: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where the part begins in each dimension
    is_first: bool  # of the ranks that have the same part


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`.

    Importing `torch.distributed.tensor` takes half a second, so this only looks whether it was
    imported: otherwise there are no DTensors.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def needs_collective(tensor: Tensor) -> bool:
    """Return whether the full tensor is on no rank alone: `whole` would be a collective."""
    if not is_sharded(tensor):
        return False
    sharded = cast(Any, tensor)
    sizes = zip(sharded.placements, sharded.device_mesh.shape, strict=True)
    return any(size > 1 and not place.is_replicate() for place, size in sizes)


def reshard(model: torch.nn.Module) -> None:
    """Drop the whole values that FSDP2 has kept of parameters since the last forward.

    Whoever changes the parts calls this: the next forward would use the old values.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in () if fsdp is None else model.modules():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
            cast(Any, module).reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. For a sharded one this is a collective: all ranks have to call it."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def shard_index(tensor: Tensor) -> int:
    """Return the number of this rank's shard; 0 for a tensor that this rank has as a whole.

    Ranks that have copies of the same part (HSDP) get the same number.
    """
    if not needs_collective(tensor):
        return 0
    mesh, index = cast(Any, tensor).device_mesh, 0
    places = zip(cast(Any, tensor).placements, mesh.get_coordinate(), mesh.shape, strict=True)
    for place, position, size in places:
        index = index if place.is_replicate() else index * size + position
    return index


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a whole tensor sharded as another is; each rank keeps its shard, without a collective.

    A tensor is returned as it is if it is sharded already, or if the other is not.
    """
    if is_sharded(tensor) or not is_sharded(other):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    like = cast(Any, other)
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def can_be_read_in_parts(tensor: Tensor) -> bool:
    """Return whether this rank's shard of a tensor is one block of the whole tensor's values."""
    if not is_sharded(tensor):
        return False
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    places = cast(Any, tensor).placements
    return all(type(place) in (Replicate, ShardPlacement) for place in places)


def shard_from_local(values: Tensor, other: Tensor) -> Tensor:
    """Return the tensor of which this rank has these values, sharded as another one is."""
    from torch.distributed.tensor import DTensor

    like = cast(Any, other)
    shape = torch.Size(like.shape)
    return DTensor.from_local(
        values.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; it shares the tensor's memory."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def shard_of(tensor: Any) -> Shard:
    """Return this rank's shard of a `DTensor`, and where it belongs. Nothing is communicated."""
    if torch.is_grad_enabled():  # then `to_local` takes part in autograd
        with torch.no_grad():
            return shard_of(tensor)
    key = tensor.device_mesh, tensor.placements, tensor.shape
    place = _places.get(key) or _places.setdefault(key, _find_place(tensor))
    return Shard(tensor.to_local(), *place)


_Place = tuple[tuple[int, ...], tuple[int, ...], bool]
_places: dict[Any, _Place] = {}  # finding a place takes half a millisecond


def _find_place(tensor: Any) -> _Place:
    """Return the shape of the whole, the offset of this rank's shard, and whether it is the first.

    The first is the rank with the lowest number of those that have the same part.
    """
    (chunk,) = tensor.__create_chunk_list__()
    coordinates = tensor.device_mesh.get_coordinate() or ()
    places = zip(tensor.placements, coordinates, strict=True)
    is_first = not any(place.is_replicate() and position for place, position in places)
    return tuple(tensor.shape), tuple(chunk.offsets), is_first


def local_with_groups(tensor: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Return this rank's shard of a `DTensor`, and the process groups that hold the other shards.

    Partial sums are reduced first, so all ranks have to call this.
    """
    from torch.distributed.tensor import Replicate

    if any(place.is_partial() for place in tensor.placements):
        reduced = [Replicate() if place.is_partial() else place for place in tensor.placements]
        tensor = tensor.redistribute(placements=reduced)
    mesh = tensor.device_mesh
    sharded = [
        dim
        for dim, place in enumerate(tensor.placements)
        if mesh.size(dim) > 1 and not place.is_replicate()
    ]
    return tensor.to_local(), tuple(mesh.get_group(dim) for dim in sharded)


def stored_values(tensor: Tensor) -> Tensor:
    """Return the values that this rank stores of a tensor, detached.

    A COO tensor gives its values without the zeros that are not stored, a nested tensor those of
    all its tensors, a complex tensor its real and imaginary parts.
    """
    tensor = local(tensor.detach())
    if tensor.is_nested:
        tensor = nested_values(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def nested_values(tensor: Tensor) -> Tensor:
    """Return the values of a nested tensor, without padding: as rows, if all are of one length."""
    parts = tensor.unbind()
    lengths = {part.shape[-1] if part.dim() else 1 for part in parts}
    shape = (-1, *lengths) if len(lengths) == 1 else (-1,)
    rows = [part.reshape(shape) for part in parts if part.numel()]
    return torch.cat(rows) if rows else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
