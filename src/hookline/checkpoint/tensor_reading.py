"""Reading named tensors from safetensors files, also from the parts that several ranks wrote.

Of a tensor that is sharded here, only the rows that this rank has are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.checkpoint.tensor_files import dtype_of, memory_of
from hookline.checkpoint.tensor_header import StoredTensor, read_header
from hookline.files.regular_files import open_handle
from hookline.printable import printable
from hookline.tensors.sharded import can_be_read_in_parts, shard_from_local, shard_of

__all__ = ["read_tensors"]

FindShard = Callable[[str], Tensor | None]


def read_tensors(
    path: Path,
    device: torch.device,
    parts: Sequence[Path] = (),
    find_shard: FindShard = lambda _: None,
) -> dict[str, Tensor]:
    """Return all tensors of a file, copied to memory: the file may be removed afterwards.

    Args:
        path: The file.
        device: Where the tensors go.
        parts: Files with the other parts of the sharded tensors in it, which become whole.
        find_shard: Returns the sharded tensor that the tensor with a name is loaded into. If that
            has the same shape, only this rank's part is read, and a `DTensor` is returned.

    Raises:
        ValueError: A file is damaged, or not a safetensors file.
        OSError: It cannot be read, is a link, or not a regular file.
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
    for part in parts:
        with _TensorFile(part) as file:
            for name in file.shards:
                if name in tied or name not in file:  # tied to another tensor, which is joined
                    continue
                piece = file.locate(name)
                if name not in shards or name not in joined or joined[name].shape != piece.whole:
                    shown = printable(name)
                    raise ValueError(f"{part.name} has a part of another tensor '{shown}'")
                joined[name].add(file, piece)
    for name in list(joined):
        tensors[name] = joined.pop(name).make(device)
    return dict(sorted(tensors.items())) | {name: tensors[other] for name, other in tied.items()}


class _Piece(NamedTuple):
    """A tensor in a file: all of a whole tensor, or the part of it that begins at an offset."""

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
        kind, shape = stored.viewed or (None, stored.shape)
        dtype = dtype_of(stored.dtype, kind)
        if math.prod(shape) * dtype.itemsize != stored.size:
            raise ValueError(f"the tensor '{printable(name)}' does not have its shape")
        whole, offset = self.shards.get(name, (shape, [0] * len(shape)))
        ends = [o + n for o, n in zip(offset, shape, strict=False)]
        dimensions = {len(whole), len(offset), len(shape)}
        if len(dimensions) > 1 or any(e > n for e, n in zip(ends, whole, strict=True)):
            raise ValueError(f"the tensor '{printable(name)}' is not a part of its whole")
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
        if size and self._file.readinto(memory_of(data, size)) != size:
            raise ValueError("it ends before its last tensor")
        return data.view(piece.dtype).view(shape)


class _Joined:
    """A tensor that is read from the pieces of several files: the whole, or this rank's part."""

    def __init__(self, name: str, first: _Piece, like: Tensor | None) -> None:
        self._name, self._dtype, self.shape = name, first.dtype, first.whole
        self._like: Any = None
        self._size, self._offset = list(first.whole), [0] * len(first.whole)
        if like is not None and list(like.shape) == first.whole and can_be_read_in_parts(like):
            own = shard_of(like)
            self._like, self._size, self._offset = like, list(own.values.shape), list(own.offset)
        self._elements = 0  # of all pieces, also those that are not read
        self._read: list[tuple[Tensor, list[int]]] = []  # each with its place in this part

    def add(self, file: _TensorFile, piece: _Piece) -> None:
        """Read what this part has of a piece."""
        if piece.dtype != self._dtype:
            raise ValueError(f"the parts of '{printable(self._name)}' have different dtypes")
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
            raise ValueError(f"parts of the tensor '{printable(self._name)}' are missing")
        if len(self._read) == 1 and list(self._read[0][0].shape) == self._size:
            values = self._read[0][0].contiguous()
        else:
            values = torch.zeros(self._size, dtype=self._dtype)
            for piece, place in self._read:
                inside = tuple(slice(o, o + n) for o, n in zip(place, piece.shape, strict=True))
                values[inside].copy_(piece)
        self._read.clear()
        return values.to(device) if self._like is None else shard_from_local(values, self._like)
