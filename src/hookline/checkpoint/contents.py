"""The contents of a checkpoint, read from its manifest and the headers of its files.

Nothing here imports torch or reads the values of tensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.checkpoint.catalog import naming_damage, read_json, read_manifest
from hookline.checkpoint.tensor_header import read_header
from hookline.files import file_limits, open_regular_file

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
class CheckpointContents:
    """A checkpoint's manifest, its model's tensors, and a summary of each section of its state.

    A summary is a number or text itself, the names in a mapping, or the number of items in a list.
    """

    manifest: dict[str, Any]
    weights: list[TensorEntry]
    state: dict[str, str]

    @property
    def parameters(self) -> int:
        """The number of elements of all weights."""
        return sum(math.prod(entry.shape) for entry in self.weights if entry.tied_to is None)


def read_contents(path: Path) -> CheckpointContents:
    """Return what a checkpoint contains."""
    manifest = read_manifest(path)
    with naming_damage(path, "model.safetensors"):
        weights = _read_weights(path / "model.safetensors")
    with naming_damage(path, "state.json"):
        tree = read_json(path / "state.json", file_limits.state_bytes)
        state = {key: _summarize(value) for key, value in tree["state"].items()}
    return CheckpointContents(manifest, weights, state)


def _read_weights(file: Path) -> list[TensorEntry]:
    """Return the tensors that the header of a safetensors file describes."""
    with open_regular_file(file) as stream:
        header = read_header(stream)
    entries: dict[str, TensorEntry] = {}
    for one in header.tensors.values():
        size = one.size // max(math.prod(one.shape), 1) * math.prod(one.whole)  # of all shards
        entries[one.name] = TensorEntry(one.name, one.dtype, one.whole, size)
    for name, other in header.tied.items():
        tied = entries[other]
        entries[name] = TensorEntry(name, tied.dtype, tied.shape, 0, other)
    return list(entries.values())


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
