"""The memory of tensors, of this process and of devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.tensors.nested import tensors_in

_STRIDED = torch.strided


def storages(values: Iterable[Any]) -> dict[Any, tuple[int, Any]]:
    """Return the storages that the tensors in values keep alive, with their sizes in bytes."""
    found: dict[Any, tuple[int, Any]] = {}
    for value in values:
        if value is None:
            continue
        is_plain = type(value) is Tensor and value.layout is _STRIDED  # the most common case
        for part in (value,) if is_plain else _dense_parts(value):
            try:
                storage = part.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
            except (NotImplementedError, RuntimeError):  # a layout without access to its storage
                found[id(part)] = (part.numel() * part.element_size(), part)
                continue
            if address:  # else it is empty, or a meta tensor
                found[address, size] = (size, storage)  # addresses are unique across devices
    return found


def _dense_parts(value: Any) -> Iterator[Tensor]:
    """Yield the dense tensors in a value, and those that sparse and wrapper tensors consist of."""
    for tensor in tensors_in(value):
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            yield from _dense_parts([getattr(tensor, name) for name in flatten()[0]])
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


def expand_buffers(model: torch.nn.Module) -> None:
    """Give expanded buffers (`Tensor.expand`) memory for each element, so that they can be loaded.

    `load_state_dict` copies into them, which torch refuses if elements share memory.
    """
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and value.layout is _STRIDED:
                pairs = zip(value.shape, value.stride(), strict=True)
                if any(size > 1 and stride == 0 for size, stride in pairs):
                    module._buffers[name] = value.contiguous()


def unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with others, which safetensors does not accept."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            tensors[name] = tensor.clone()
        seen.add(storage)
    return tensors


def resident_mb() -> float:
    """Return the memory of this process that is in RAM, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6
