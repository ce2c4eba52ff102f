"""The header of a safetensors file: which tensors it has, and where.

It may come from a stranger, so everything in it is checked against the size of the file: tensors
neither overlap nor leave gaps, as the format requires, and a shape has exactly its bytes. Nothing
here imports torch.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, BinaryIO

from hookline.files import file_limits, parse_json

_DTYPES = {  # those that snapshot.py writes: torch's names, and the sizes of their elements
    **{"BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "I16": ("int16", 2)},
    **{"I32": ("int32", 4), "I64": ("int64", 8), "F16": ("float16", 2), "BF16": ("bfloat16", 2)},
    **{"F32": ("float32", 4), "F64": ("float64", 8)},
}
_MAX_DIMENSIONS = 64
_MAX_LENGTH = 1 << 62
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, at these bytes behind the header.

    Attributes:
        dtype: The name of its dtype in torch, such as float32.
        whole: The shape of the tensor that it is a shard of; its own shape, if it is not a shard.
        offset: Where the shard begins in that tensor.
    """

    name: str
    dtype: str
    shape: list[int]
    begin: int
    size: int
    whole: list[int]
    offset: list[int]


@dataclass(frozen=True)
class TensorHeader:
    """The tensors of a file.

    Attributes:
        tensors: Those that are written, by name.
        tied: The names of the others, each with that of the written tensor it is the same as.
        shards: The names of those that are a shard of a tensor.
        data_start: Where the first tensor begins in the file.
    """

    tensors: dict[str, StoredTensor]
    tied: dict[str, str]
    shards: list[str]
    data_start: int


def read_header(file: BinaryIO) -> TensorHeader:
    """Return the header of an open file, which is then at the first tensor; raise ValueError."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError(f"its header has {length} bytes and the file {size}")
    if length > file_limits.state_bytes:
        raise ValueError(
            f"its header has {length:,} bytes; hookline.file_limits.state_bytes allows more"
        )
    header = _mapping(parse_json(file.read(length)), "the header")
    metadata = _mapping(header.pop(_METADATA, None) or {}, _METADATA)
    viewed = _parse_mapping(metadata, "hookline.viewed")
    shards = _parse_mapping(metadata, "hookline.shards")
    found = [_parse(name, one, viewed.get(name), shards.get(name)) for name, one in header.items()]
    found.sort(key=lambda one: (one.begin, one.size))
    position = 0
    for one in found:
        if one.begin != position:
            raise ValueError(f"the tensor '{one.name}' overlaps another or leaves a gap")
        position += one.size
    if 8 + length + position != size:
        raise ValueError(f"its tensors have {position} bytes and the file {size - 8 - length}")
    tied = _parse_mapping(metadata, "hookline.same")
    for name, other in tied.items():
        if name in header or not isinstance(other, str) or other not in header:
            raise ValueError(f"'{name}' is tied to a tensor that the file lacks")
    names = [name for name in shards if name in header or name in tied]
    return TensorHeader({one.name: one for one in found}, tied, names, 8 + length)


def _parse(name: str, fields: Any, viewed: Any, place: Any) -> StoredTensor:
    """Return a tensor; `viewed` is the dtype and shape of one that is written as bytes."""
    fields = _mapping(fields, f"the tensor '{name}'")
    stored, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(stored, str)
        and stored in _DTYPES
        and _is_shape(shape)
        and _is_shape(offsets)
        and len(offsets) == 2
        and offsets[1] - offsets[0] == math.prod(shape) * _DTYPES[stored][1]
    ):
        raise ValueError(f"the tensor '{name}' has no dtype, shape and offsets that match")
    dtype = _DTYPES[stored][0]
    if viewed is not None:
        if stored != "U8" or not isinstance(viewed, list) or len(viewed) != 2:
            raise ValueError(f"the tensor '{name}' has no valid dtype in 'hookline.viewed'")
        dtype, shape = viewed
    whole, offset = (shape, [0] * len(shape)) if place is None else place
    is_valid = isinstance(dtype, str) and all(map(_is_shape, (shape, whole, offset)))
    if not is_valid or not len(whole) == len(offset) == len(shape):
        raise ValueError(f"the tensor '{name}' has no valid dtype, shape and place")
    if any(start + n > end for start, n, end in zip(offset, shape, whole, strict=True)):
        raise ValueError(f"the tensor '{name}' is not within its whole")
    return StoredTensor(name, dtype, shape, offsets[0], offsets[1] - offsets[0], whole, offset)


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(length) is int and 0 <= length < _MAX_LENGTH for length in value)
    )


def _parse_mapping(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    text = metadata.get(key, "{}")
    if not isinstance(text, str):
        raise ValueError(f"'{key}' is not a text")  # noqa: TRY004 - damage of a file
    return _mapping(parse_json(text.encode()), f"'{key}'")


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a mapping")  # noqa: TRY004 - damage of a file
    return value
