"""Named tensors of every dtype in safetensors files, written and read.

Any safetensors reader can read the file. Its metadata has, as JSON, what the format lacks:
`hookline.same` maps the names of tied weights to the tensor that is written, `hookline.viewed` has
the dtype and shape of tensors that are written as bytes, because the format lacks their dtype, and
`hookline.shards` the shape of the whole tensor and the offset of tensors that are a shard of one.
Several ranks write the shards of a tensor, each into a file of its own. Of a tensor that is sharded
here, only the rows that this rank has are read.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.checkpoint.tensor_header import StoredTensor, read_header
from hookline.files.regular_files import open_handle
from hookline.tensors.sharded import Shard, can_be_read_in_parts, shard_from_local, shard_of

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


FindShard = Callable[[str], Tensor | None]


# -- writing --------------------------------------------------------------------------------------


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
        return _memory_of(self._memory, self._size)

    def reserve(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> None:
        """Allocate the memory for tensors like these, and write to every page of it."""
        before = self._memory
        self._lay_out(tensors, shards)
        if self._memory is not before:
            self._memory[self._size - sum(view.nbytes for view in self._views) :].zero_()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard] = _NONE) -> None:
        """Copy tensors of any device. Tied tensors are copied once."""
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


def _memory_of(tensor: Tensor, size: int) -> memoryview:
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


# -- reading --------------------------------------------------------------------------------------


def read_tensors(
    path: Path,
    device: torch.device,
    shard_files: Sequence[Path] = (),
    find_shard: FindShard = lambda _: None,
) -> dict[str, Tensor]:
    """Return all tensors of a file, copied to memory: the file may be removed afterwards.

    Args:
        path: The file.
        device: Where the tensors go.
        shard_files: Files with the other shards of the tensors in it, which become whole.
        find_shard: Returns the sharded tensor that the tensor with a name is loaded into. If that
            has the same shape, only this rank's shard is read, and a `DTensor` is returned.
    """
    tensors: dict[str, Tensor] = {}
    joined: dict[str, _Joined] = {}
    with _TensorFile(path) as file:
        tied, shards = file.tied, file.shards
        for name in file.stored:
            piece, like = file.locate(name), find_shard(name)
            if name in shards or like is not None:
                joined[name] = _Joined(name, piece, like)
                joined[name].add(file, piece)
            else:
                tensors[name] = file.read(piece).to(device)
    for other in shard_files:
        with _TensorFile(other) as file:
            for name in file.shards:
                if name in tied or name not in file:  # tied to another tensor, which is joined
                    continue
                piece = file.locate(name)
                if name not in shards or name not in joined or joined[name].shape != piece.whole:
                    raise ValueError(f"{other.name} has a shard of another tensor '{name}'")
                joined[name].add(file, piece)
    for name in list(joined):
        tensors[name] = joined.pop(name).make(device)
    return dict(sorted(tensors.items())) | {name: tensors[other] for name, other in tied.items()}


class _Piece(NamedTuple):
    """A tensor in a file: all of a whole tensor, or the shard of it that begins at an offset."""

    stored: StoredTensor
    dtype: torch.dtype
    shape: list[int]
    whole: list[int]
    offset: list[int]


class _TensorFile:
    """An open file, whose header was checked."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_handle(path), "rb")
        try:
            header = read_header(self._file)
        except BaseException:
            self._file.close()
            raise
        self.stored = {one.name: one for one in header.tensors}
        self.tied, self.shards = header.tied, header.shards
        self._start = header.data_start

    def __enter__(self) -> _TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.tied

    def locate(self, name: str) -> _Piece:
        """Return where a tensor belongs, after checking its shape."""
        stored = self.stored[self.tied.get(name, name)]
        dtype, shape = _DTYPES[stored.dtype], stored.shape
        if stored.viewed is not None:
            dtype, shape = _find_dtype(stored.viewed[0]), stored.viewed[1]
        if math.prod(shape) * dtype.itemsize != stored.size:
            raise ValueError(f"the tensor '{name}' does not have its shape")
        whole, offset = self.shards.get(name, (shape, [0] * len(shape)))
        ends = [o + n for o, n in zip(offset, shape, strict=False)]
        dimensions = {len(whole), len(offset), len(shape)}
        if len(dimensions) > 1 or any(e > n for e, n in zip(ends, whole, strict=True)):
            raise ValueError(f"the tensor '{name}' is not within its whole")
        return _Piece(stored, dtype, shape, whole, offset)

    def read(self, piece: _Piece, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some rows of it."""
        stored, shape = piece.stored, list(piece.shape)
        begin, size = stored.begin, stored.size
        if rows is not None:
            row = math.prod(shape[1:]) * piece.dtype.itemsize
            shape[0] = rows.stop - rows.start
            begin, size = begin + rows.start * row, shape[0] * row
        data = torch.empty(size, dtype=torch.uint8)
        self._file.seek(self._start + begin)
        if size and self._file.readinto(_memory_of(data, size)) != size:
            raise ValueError("it ends before its last tensor")
        return data.view(piece.dtype).view(shape)


class _Joined:
    """A tensor that is read from the pieces of several files: the whole, or this rank's shard."""

    def __init__(self, name: str, first: _Piece, like: Tensor | None) -> None:
        self._name, self._dtype, self.shape = name, first.dtype, first.whole
        self._like: Any = None
        self._size, self._offset = list(first.whole), [0] * len(first.whole)
        if like is not None and list(like.shape) == first.whole and can_be_read_in_parts(like):
            own = shard_of(like)
            self._like, self._size, self._offset = like, list(own.values.shape), list(own.offset)
        self._elements = 0  # of all pieces, also those that are not read
        self._read: list[tuple[Tensor, list[int]]] = []  # each with its place in this tensor

    def add(self, file: _TensorFile, piece: _Piece) -> None:
        """Read what this tensor has of a piece."""
        if piece.dtype != self._dtype:
            raise ValueError(f"the shards of '{self._name}' have different dtypes")
        self._elements += math.prod(piece.shape)
        places = list(zip(piece.offset, piece.shape, self._offset, self._size, strict=True))
        common = [(max(theirs, own), min(theirs + n, own + m)) for theirs, n, own, m in places]
        if any(begin >= end for begin, end in common):
            return
        inside = [
            slice(begin - offset, end - offset)
            for (begin, end), offset in zip(common, piece.offset, strict=True)
        ]
        values = file.read(piece, inside[0] if inside else None)
        if len(inside) > 1:
            values = values[(slice(None), *inside[1:])]
        place = [begin - own for (begin, _), own in zip(common, self._offset, strict=True)]
        self._read.append((values, place))

    def make(self, device: torch.device) -> Tensor:
        """Return the tensor, once all pieces were added."""
        if math.prod(self.shape) != self._elements:
            raise ValueError(f"shards of the tensor '{self._name}' are missing")
        if len(self._read) == 1 and list(self._read[0][0].shape) == self._size:
            values = self._read[0][0].contiguous()
        else:
            values = torch.zeros(self._size, dtype=self._dtype)
            for piece, place in self._read:
                inside = tuple(slice(o, o + n) for o, n in zip(place, piece.shape, strict=True))
                values[inside].copy_(piece)
        self._read.clear()
        return values.to(device) if self._like is None else shard_from_local(values, self._like)


def _find_dtype(name: str) -> torch.dtype:
    """Return a dtype of torch; quantized ones are never written."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):
        raise ValueError(f"unknown dtype '{name}'")
    return dtype
