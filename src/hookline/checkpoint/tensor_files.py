"""Named tensors of every dtype in a safetensors file.

Any safetensors reader can read the file. Its metadata has, as JSON, what the format lacks:
`hookline.same` maps the names of tied weights to the tensor that is written, `hookline.viewed` has
the dtype and shape of tensors that are written as bytes, because the format lacks their dtype, and
`hookline.shards` the shape of the whole tensor and the offset of tensors that are a part of one.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.printable import printable
from hookline.tensors.sharded import Shard

__all__ = ["TensorBuffer", "dtype_of", "memory_of", "write_tensors"]

_NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NATIVE.items()}
_ALIGNMENT = 64
_NONE: Mapping[str, Any] = {}
_SPARE = 1 << 20  # so that tensors may grow a little without a new allocation


class _Entry(NamedTuple):
    """A tensor's place in a layout; `first` is the name of the tied tensor that is written."""

    name: str
    first: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class TensorBuffer:
    """Memory that holds a safetensors file, and is reused for the next one.

    Tensors are copied straight to their place in the file. The layout is kept while names, dtypes,
    shapes and ties stay the same, the memory while it is large enough. The memory is pinned if
    a tensor is on an accelerator.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._entries: list[_Entry] = []
        self._shards: dict[str, Any] = {}
        self._views: list[Tensor] = []
        self._size = 0
        self._is_pinned = False

    @property
    def data(self) -> memoryview:
        """The bytes of the file. They are valid until the next call of `reserve` or `copy`."""
        return memory_of(self._memory, self._size)

    def reserve(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> None:
        """Allocate the memory for tensors like these, and write to every page of it."""
        before = self._memory
        self._lay_out(tensors, shards)
        if self._memory is not before:
            self._memory[self._size - sum(view.nbytes for view in self._views) :].zero_()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard] = _NONE) -> None:
        """Copy tensors of any device. Tied tensors are copied once.

        Args:
            tensors: The tensors by name.
            shards: Those of them that are a rank's part of a tensor.
        """
        sources = self._lay_out(tensors, shards)
        accelerator = _accelerator()
        for view, source in zip(self._views, sources, strict=True):
            values = source if source.dtype in _NATIVE else _as_bytes(source)
            view.copy_(values, non_blocking=values.device.type == accelerator)
        for device in {source.device for source in sources if source.device.type == accelerator}:
            torch.accelerator.synchronize(device)

    def _lay_out(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> list[Tensor]:
        """Update the views into the memory; return the tensors to copy there, in their order."""
        first_names: dict[Any, str] = {}
        entries = [
            _Entry(name, first_names.setdefault(_memory_key(t, name), name), t.dtype, t.shape)
            for name, t in tensors.items()
        ]
        places = {name: (one.shape, one.offset) for name, one in shards.items()}
        if (entries, places) != (self._entries, self._shards) or not self._size:
            self._shards = places
            self._entries = []  # in case that the memory cannot be allocated
            self._allocate(entries, {tensor.device.type for tensor in tensors.values()})
            self._entries = entries
        return [tensors[entry.name] for entry in _written(entries)]

    def _allocate(self, entries: list[_Entry], devices: set[str]) -> None:
        written = _written(entries)
        header = _encode_header(entries, written, self._shards)
        self._size = len(header) + sum(entry.bytes for entry in written)
        accelerator = _accelerator()
        is_pinned = accelerator in devices and accelerator != "mps"
        is_pinned = is_pinned if devices else self._is_pinned  # nothing to copy needs no other
        if self._memory.numel() < self._size or self._is_pinned != is_pinned:
            self._views = []
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before the new allocation
            size = self._size + _SPARE
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
            self._is_pinned = is_pinned
        start = len(header)
        self._memory[:start] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._views = []
        for entry in written:
            view = self._memory[start : start + entry.bytes]
            if entry.dtype in _NATIVE:
                view = view.view(entry.dtype).view(entry.shape)
            self._views.append(view)
            start += entry.bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device. Tied tensors are written once."""
    buffer = TensorBuffer()
    buffer.copy(tensors)
    path.write_bytes(buffer.data)


def dtype_of(stored: str, viewed: str | None) -> torch.dtype:
    """Return the dtype of a tensor in a file.

    Args:
        stored: The format's name of its dtype.
        viewed: The name of its dtype in torch, if it is written as bytes.
    """
    return _DTYPES[stored] if viewed is None else _find_dtype(viewed)


def _find_dtype(name: str) -> torch.dtype:
    """Return a dtype of torch; quantized ones are never written."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):
        raise ValueError(f"unknown dtype '{printable(name, 40)}'")
    return dtype


def memory_of(tensor: Tensor, size: int) -> memoryview:
    """Return the first bytes of a tensor's memory, for reading and writing."""
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    memory._tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(memory).cast("B")


def _written(entries: list[_Entry]) -> list[_Entry]:
    """Return the tensors in the order of the file: large elements first, so all are aligned."""
    written = [entry for entry in entries if entry.first == entry.name]
    return sorted(written, key=lambda entry: -entry.dtype.itemsize)


def _encode_header(
    entries: list[_Entry], written: list[_Entry], shards: Mapping[str, Any]
) -> bytes:
    metadata = {"format": "pt"}
    same = {entry.name: entry.first for entry in entries if entry.first != entry.name}
    viewed = {
        entry.name: [str(entry.dtype).removeprefix("torch."), list(entry.shape)]
        for entry in written
        if entry.dtype not in _NATIVE
    }
    if same:
        metadata["hookline.same"] = json.dumps(same)
    if viewed:
        metadata["hookline.viewed"] = json.dumps(viewed)
    if shards:
        metadata["hookline.shards"] = json.dumps(shards)
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for entry in written:
        is_native = entry.dtype in _NATIVE
        header[entry.name] = {
            "dtype": _NATIVE.get(entry.dtype, "U8"),
            "shape": list(entry.shape) if is_native else [entry.bytes],
            "data_offsets": [start, start + entry.bytes],
        }
        start += entry.bytes
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor of a dtype that safetensors lacks as a flat tensor of bytes."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).view(torch.uint8)


def _accelerator() -> str | None:
    """Return the type of the device that computes beside the CPU, such as "cuda"."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def _memory_key(tensor: Tensor, name: str) -> Any:
    """Return a key that is equal for two tensors in the same memory."""
    if tensor.numel() == 0:
        return name
    memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return (*memory, tensor.is_conj(), tensor.is_neg())
