"""Reading named tensors from the safetensors files of a checkpoint, which `snapshot.py` writes.

Several ranks write the shards of a tensor, each into a file of its own. Of a tensor that is sharded
here, only the rows that this rank has are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.snapshot import memory_of
from hookline.checkpoint.tensor_header import StoredTensor, read_header
from hookline.files import open_handle
from hookline.tensors.sharded import can_be_read_in_parts, shard_from_local, shard_of

FindShard = Callable[[str], Tensor | None]


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
        tied, shards = file.header.tied, set(file.header.shards)
        for name, stored in file.header.tensors.items():
            like = find_shard(name)
            if name in shards or like is not None:
                joined[name] = _Joined(name, stored, like)
                joined[name].add(file, stored)
            else:
                tensors[name] = file.read(stored).to(device)
    for other in shard_files:
        with _TensorFile(other) as file:
            for name in file.header.shards:
                if name in tied:  # to another tensor, which is joined
                    continue
                stored = file.header.tensors[file.header.tied.get(name, name)]
                if name not in shards or name not in joined or joined[name].shape != stored.whole:
                    raise ValueError(f"{other.name} has a shard of another tensor '{name}'")
                joined[name].add(file, stored)
    for name in list(joined):
        tensors[name] = joined.pop(name).make(device)
    return dict(sorted(tensors.items())) | {name: tensors[other] for name, other in tied.items()}


class _TensorFile:
    """An open file, whose header was checked."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_handle(path), "rb")
        try:
            self.header = read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> _TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, stored: StoredTensor, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some rows of it."""
        dtype, shape = _find_dtype(stored.dtype), list(stored.shape)
        begin, size = stored.begin, stored.size
        if math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"the tensor '{stored.name}' does not have its shape")
        if rows is not None:
            row = math.prod(shape[1:]) * dtype.itemsize
            shape[0] = rows.stop - rows.start
            begin, size = begin + rows.start * row, shape[0] * row
        data = torch.empty(size, dtype=torch.uint8)
        self._file.seek(self.header.data_start + begin)
        if size and self._file.readinto(memory_of(data, size)) != size:
            raise ValueError("it ends before its last tensor")
        return data.view(dtype).view(shape)


class _Joined:
    """A tensor that is read from the pieces of several files: the whole, or this rank's shard."""

    def __init__(self, name: str, first: StoredTensor, like: Tensor | None) -> None:
        self._name, self._dtype, self.shape = name, first.dtype, first.whole
        self._like: Any = None
        self._size, self._offset = list(first.whole), [0] * len(first.whole)
        if like is not None and list(like.shape) == first.whole and can_be_read_in_parts(like):
            own = shard_of(like)
            self._like, self._size, self._offset = like, list(own.values.shape), list(own.offset)
        self._elements = 0  # of all pieces, also those that are not read
        self._read: list[tuple[Tensor, list[int]]] = []  # each with its place in this tensor

    def add(self, file: _TensorFile, piece: StoredTensor) -> None:
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
            values = torch.zeros(self._size, dtype=_find_dtype(self._dtype))
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
