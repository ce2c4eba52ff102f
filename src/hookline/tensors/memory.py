"""The memory that is behind tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.nested import tensors_in

__all__ = ["storages", "unshared"]

_STRIDED = torch.strided


def storages(values: Iterable[Any]) -> dict[Any, tuple[int, Any]]:
    """Return the memory that the tensors in values keep alive.

    Returns:
        By the memory's place, its bytes and who holds it.
    """
    found: dict[Any, tuple[int, Any]] = {}
    for value in values:
        if value is None:
            continue
        plain = type(value) is Tensor and value.layout is _STRIDED  # as most often
        for part in (value,) if plain else _dense(value):
            try:
                storage = part.untyped_storage()
                where, size = storage.data_ptr(), storage.nbytes()
            except (NotImplementedError, RuntimeError):  # a layout that does not show its memory
                found[id(part)] = (part.numel() * part.element_size(), part)
                continue
            if where:  # else it is empty, or has no memory behind it (meta)
                found[where, size] = (size, storage)  # no two devices have the same addresses
    return found


def _dense(value: Any) -> Iterator[Tensor]:
    """Yield what the tensors in a value are made of: themselves, unless sparse or wrappers."""
    for tensor in tensors_in(value):
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            yield from _dense([getattr(tensor, name) for name in flatten()[0]])
        elif tensor.layout is _STRIDED:
            yield tensor
        elif tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        else:
            yield tensor


def unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy those tensors that share memory with others: safetensors refuses these."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            tensors[name] = tensor.clone()
        seen.add(storage)
    return tensors
