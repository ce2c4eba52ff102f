"""The contents of a checkpoint, read from its manifest and the headers of its files.

Nothing here imports torch or reads the values of tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.checkpoint.checkpoint_lookup import damage_error, read_manifest
from hookline.checkpoint.tensor_header import read_header
from hookline.files.limits import file_limits
from hookline.files.regular_files import open_regular_file, read_regular_file
from hookline.files.strict_json import MAX_STATE_DEPTH, parse_json

_DTYPES = {"F": "float", "I": "int", "U": "uint", "C": "complex", "BF": "bfloat"}
_MAX_SHOWN = 8


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the model; one that is tied to another has the size 0."""

    name: str
    dtype: str
    shape: list[int]
    size: int
    tied_to: str | None = None


@dataclass(frozen=True)
class StateSection:
    """A section of the state, such as `optimizers`.

    Attributes:
        summary: A number or text itself; the names in a mapping; the number of items in a list.
        tensors: How many tensors it contains.
        size: The size of these in bytes.
    """

    name: str
    summary: str
    tensors: int
    size: int


@dataclass(frozen=True)
class CheckpointContents:
    """A checkpoint's manifest, its model's tensors, and the sections of its state."""

    manifest: dict[str, Any]
    weights: list[TensorEntry]
    state: list[StateSection]

    @property
    def parameters(self) -> int:
        """The number of elements of all weights."""
        return sum(math.prod(entry.shape) for entry in self.weights if entry.tied_to is None)


def read_contents(path: Path) -> CheckpointContents:
    """Return what a checkpoint contains."""
    manifest = read_manifest(path)
    name = "model.safetensors"
    try:
        weights = _read_weights(path / name)
        name = "state.safetensors"
        tensors = {entry.name: entry.size for entry in _read_weights(path / name)}
        name = "state.json"
        data = read_regular_file(path / name, file_limits.state_bytes)
        tree = parse_json(data, MAX_STATE_DEPTH)
        state = [_describe(key, value, tensors) for key, value in tree["state"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"cannot be read: {type(error).__name__}: {error}"
        raise damage_error(path, name, problem) from error
    return CheckpointContents(manifest, weights, state)


def _read_weights(file: Path) -> list[TensorEntry]:
    """Return the tensors that the header of a safetensors file describes."""
    with open_regular_file(file) as stream:
        header = read_header(stream)
    entries: dict[str, TensorEntry] = {}
    for one in header.tensors:
        dtype, shape = one.viewed or (_torch_name(one.dtype), one.shape)
        size = one.size
        if one.name in header.shards:  # other files have the other parts
            item_size = size // max(math.prod(shape), 1)
            shape = header.shards[one.name][0]
            size = math.prod(shape) * item_size
        entries[one.name] = TensorEntry(one.name, dtype, shape, size)
    for name, other in header.tied.items():
        tied = entries[other]
        entries[name] = TensorEntry(name, tied.dtype, tied.shape, 0, other)
    return list(entries.values())


def _torch_name(dtype: str) -> str:
    """Return torch's name of a dtype of safetensors: `float32` for F32."""
    letters = dtype.rstrip("0123456789")
    return _DTYPES[letters] + dtype[len(letters) :] if letters in _DTYPES else dtype.lower()


def _describe(name: str, value: Any, sizes: dict[str, int]) -> StateSection:
    used = set(_tensors_in(value))
    size = sum(sizes[tensor] for tensor in used)
    return StateSection(name, _summarize(value), len(used), size)


def _summarize(value: Any) -> str:
    if isinstance(value, dict) and "$" in value:
        kind, inner = value["$"], value["v"]
        if kind in ("dict", "OrderedDict", "Counter"):
            return _list_names([str(key) for key, _ in inner])
        return f"{len(inner)} items" if isinstance(inner, list) else str(kind)
    if isinstance(value, dict):
        return _list_names(list(value))
    if isinstance(value, list):
        return f"{len(value)} item{'' if len(value) == 1 else 's'}"
    return json.dumps(value)


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (", ".join(names[:_MAX_SHOWN]) or "empty") + more


def _tensors_in(value: Any) -> Iterator[str]:
    """Yield the names of the tensors in a part of the state, as `state.json` has it."""
    if isinstance(value, dict):
        if value.get("$") in ("tensor", "ndarray"):
            yield value["v"]
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _tensors_in(item)
