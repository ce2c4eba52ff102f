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

_ITEM_SIZES = {  # the dtypes that tensor_files.py writes
    **{"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2},
    **{"I32": 4, "F32": 4, "I64": 8, "F64": 8},
}
_MAX_DIMENSIONS = 64
_MAX_LENGTH = 1 << 62
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, at these bytes behind the header.

    Attributes:
        dtype: The format's name of the dtype, such as F32.
        viewed: The dtype of torch and the shape, if the tensor is written as bytes because the
            format lacks its dtype.
    """

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int
    viewed: tuple[str, list[int]] | None = None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class TensorHeader:
    """The tensors of a file.

    Attributes:
        tensors: Those that are written, in their order in the file.
        tied: The names of the others, each with that of the written tensor it is the same as.
        shards: The shape of the whole tensor and the offset, of those that are a shard of one.
        data_start: Where the first tensor begins in the file.
    """

    tensors: list[StoredTensor]
    tied: dict[str, str]
    shards: dict[str, tuple[list[int], list[int]]]
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
    tensors = [_parse_tensor(name, fields, viewed.get(name)) for name, fields in header.items()]
    tensors.sort(key=lambda one: (one.begin, one.end))
    position = 0
    for one in tensors:
        if one.begin != position:
            raise ValueError(f"the tensor '{one.name}' overlaps another or leaves a gap")
        position = one.end
    if 8 + length + position != size:
        raise ValueError(f"its tensors have {position} bytes and the file {size - 8 - length}")
    tied = _parse_mapping(metadata, "hookline.same")
    for name, other in tied.items():
        if name in header or not isinstance(other, str) or other not in header:
            raise ValueError(f"'{name}' is tied to a tensor that the file lacks")
    shards = _parse_mapping(metadata, "hookline.shards")
    for name, place in shards.items():
        if not isinstance(place, list) or len(place) != 2 or not all(map(_is_shape, place)):
            raise ValueError(f"'{name}' has no valid place in 'hookline.shards'")
    return TensorHeader(tensors, tied, shards, 8 + length)


def _parse_tensor(name: str, fields: Any, viewed: Any) -> StoredTensor:
    fields = _mapping(fields, f"the tensor '{name}'")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(dtype, str)
        and dtype in _ITEM_SIZES
        and _is_shape(shape)
        and _is_shape(offsets)
        and len(offsets) == 2
        and offsets[1] - offsets[0] == math.prod(shape) * _ITEM_SIZES[dtype]
    ):
        raise ValueError(f"the tensor '{name}' has no dtype, shape and offsets that match")
    if viewed is not None and not (
        dtype == "U8"
        and isinstance(viewed, list)
        and len(viewed) == 2
        and isinstance(viewed[0], str)
        and _is_shape(viewed[1])
    ):
        raise ValueError(f"the tensor '{name}' has no valid dtype in 'hookline.viewed'")
    view = None if viewed is None else (viewed[0], viewed[1])
    return StoredTensor(name, dtype, shape, offsets[0], offsets[1], view)


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
