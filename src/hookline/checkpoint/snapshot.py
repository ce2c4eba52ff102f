"""A snapshot: a copy of a model and a state, as the contents of a checkpoint's files.

The state is JSON that restores every type, with the tensors in a file of their own. Types that JSON
has are written as they are: None, booleans, 64-bit integers, finite floats, strings, lists, and
dicts with string keys. Everything else is an object with the key `$`, the type, and `v`, the value.
A tensor is a name in the tensors' file: `{"$": "tensor", "v": "t0"}`.

Tensors of every dtype are written in safetensors files, which any safetensors reader can read. The
metadata has, as JSON, what the format lacks: `hookline.same` maps the names of tied weights to the
tensor that is written, `hookline.viewed` has the dtype and shape of tensors that are written as
bytes, because the format lacks their dtype, and `hookline.shards` the shape of the whole tensor and
the offset of tensors that are a shard of one. `tensor_files.py` reads them.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.context import LazyDict, LazyFloat, read_lazy
from hookline.errors import CheckpointError
from hookline.tensors.sharded import Shard, is_sharded, shard_of

_MAX_DEPTH = 100  # JSON parsers fail at several hundred levels
_KEYS = (type(None), bool, int, float, str, bytes)
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "Size"}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_MAX_KEY = 200  # characters of a key in a path
_INT64_LIMIT = 1 << 63
_HINT = (
    "A checkpoint can hold None, bool, int, float, complex, str, bytes, dicts, lists, tuples, "
    "sets, dense tensors, numpy arrays and torch's Size, dtype and device. Convert the value to "
    "these types, or remove it from the state."
)
NATIVE_DTYPES = {
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
_ALIGNMENT = 64
_NONE: Mapping[str, Any] = {}
_SPARE = 1 << 20  # so that tensors may grow a little without a new allocation


# -- values as JSON --------------------------------------------------------------------------------


class Encoder:
    """Converts a tree to JSON, and collects its tensors by name.

    A tensor that occurs several times is collected once. A `LazyFloat` is saved as a float, a
    `Metrics` as a dict, a `Parameter` as a tensor.
    """

    def __init__(self, root: str, *, numbers_only: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.shards: dict[str, Shard] = {}  # those of `tensors` that are shards
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # an id is unique only while its object is alive
        self._root = root
        self._numbers_only = numbers_only

    def encode(self, value: Any, path: str = "", depth: int = 0) -> Any:
        """Return a value as JSON, or raise an error that names its path in the tree."""
        if depth > _MAX_DEPTH:
            raise CheckpointError(
                f"{self._root}{path[:80]}… is nested more than {_MAX_DEPTH} levels deep. Check "
                "whether it contains itself."
            )
        kind: Any = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_INT64_LIMIT <= value < _INT64_LIMIT else {"$": "int", "v": hex(value)}
        if kind is float or kind is LazyFloat:
            return _encode_float(float(value))
        if kind is str:
            return value if _is_text(value) else {"$": "str", "v": _encode_bytes(value)}
        if kind is list or kind in _SEQUENCES:
            items = [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            return items if kind is list else {"$": _SEQUENCES[kind], "v": items}
        if kind in _DICTS or isinstance(value, LazyDict):
            return self._encode_dict(value, _DICTS.get(kind, "dict"), path, depth)
        if kind in _SETS:
            members = [self._encode_key(v, path, depth) for v in value]
            return {"$": _SETS[kind], "v": sorted(members, key=repr)}
        return self._encode_other(value, kind, path)

    def _encode_dict(self, value: Mapping[Any, Any], kind: str, path: str, depth: int) -> Any:
        pairs = [
            (key, self.encode(v, f"{path}[{_safe_repr(key)}]", depth + 1))
            for key, v in value.items()
        ]
        is_json = all(type(key) is str and key != "$" and _is_text(key) for key, _ in pairs)
        if is_json and kind == "dict":
            return dict(pairs)
        return {"$": kind, "v": [[self._encode_key(k, path, depth), v] for k, v in pairs]}

    def _encode_key(self, key: Any, path: str, depth: int) -> Any:
        if not _is_key(key):
            raise CheckpointError(
                f"{self._root}{path} has a key or member of type {_type_name(type(key))}: "
                f"{_safe_repr(key)}. "
                "Keys and set members can be None, numbers, str, bytes and tuples of these."
            )
        return self.encode(key, path, depth + 1)

    def _encode_other(self, value: Any, kind: Any, path: str) -> Any:
        if kind is bytes:
            return {"$": "bytes", "v": _encode_bytes(value)}
        if kind is complex:
            return {"$": "complex", "v": [_encode_float(value.real), _encode_float(value.imag)]}
        if kind is torch.dtype or kind is torch.device:
            return {"$": kind.__name__, "v": str(value).removeprefix("torch.")}
        if is_sharded(value) and not self._numbers_only:
            return self._encode_shard(value, path)
        if kind is Tensor or kind is torch.nn.Parameter:
            return self._encode_tensor(value, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._encode_numpy(numpy, value, path)
        raise self._unsupported(path, f"is a {_type_name(kind)}")

    def _encode_shard(self, value: Tensor, path: str) -> Any:
        # All ranks have to give it the same name, and may have other tensors before it.
        while path in self.shards:  # paths have only the beginning of long keys
            path += "'"
        self.shards[path] = shard_of(value)
        self.tensors[path] = self.shards[path].values
        return {"$": "tensor", "v": path}

    def _encode_tensor(self, value: Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise self._unsupported(
                path, f"is a {value.layout} tensor of {value.dtype}, {value.device}"
            )
        if self._numbers_only:
            if value.numel() != 1:
                raise self._unsupported(path, f"is a tensor of shape {tuple(value.shape)}")
            return self.encode(read_lazy(value), path)
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"t{len(self.tensors)}"
            self._alive.append(value)
            self.tensors[name] = value.detach()
        return {"$": "tensor", "v": name}

    def _encode_numpy(self, numpy: Any, value: Any, path: str) -> Any:
        dtype = value.dtype
        if dtype.hasobject or not dtype.itemsize or numpy.dtype(dtype.str) != dtype:
            raise self._unsupported(path, f"is a numpy {type(value).__name__} of {dtype}")
        if isinstance(value, numpy.generic):
            return {"$": "numpy", "dtype": dtype.str, "v": _encode_bytes(value.tobytes())}
        name = f"t{len(self.tensors)}"
        data = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        self.tensors[name] = torch.from_numpy(data if data.flags.writeable else data.copy())
        return {"$": "ndarray", "dtype": dtype.str, "shape": list(value.shape), "v": name}

    def _unsupported(self, path: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._root}{path} {what}, which cannot be saved. {_HINT}")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that `Encoder.encode` converted."""
    return Decoder(tensors).decode(value)


class Decoder:
    """Converts JSON, which may come from a stranger, back to trees with these tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._arrays: set[str] = set()

    def decode(self, value: Any, depth: int = 0) -> Any:
        """Return the tree that `Encoder.encode` converted."""
        if depth > 2 * _MAX_DEPTH:
            raise ValueError("it is nested too deep")
        if isinstance(value, list):
            return [self.decode(v, depth + 1) for v in value]
        if not isinstance(value, dict):
            return value
        if "$" not in value:
            return {k: self.decode(v, depth + 1) for k, v in value.items()}
        kind, inner = value["$"], value["v"]
        if kind in ("tuple", "Size", "set", "frozenset", "complex"):
            return _COLLECTIONS[kind](self.decode(_expect(list, inner), depth + 1))
        if kind in ("dict", "OrderedDict", "Counter"):
            pairs = [
                (self.decode(k, depth + 1), self.decode(v, depth + 1))
                for k, v in _expect(list, inner)
            ]
            return _COLLECTIONS[kind](pairs)
        if kind == "tensor":
            return self._tensors[inner]
        if kind in ("numpy", "ndarray"):
            return self._decode_numpy(kind, value)
        if kind not in _SCALARS:
            raise ValueError(f"unknown type {kind!r}")
        return _SCALARS[kind](_expect(str, inner))

    def _decode_numpy(self, kind: str, value: Any) -> Any:
        try:
            import numpy
        except ImportError:
            raise CheckpointError(
                "This checkpoint contains numpy values, and numpy is not installed: pip install "
                "numpy"
            ) from None
        dtype = numpy.dtype(_expect(str, value["dtype"]))
        if dtype.hasobject or dtype.subdtype is not None or dtype.names is not None:
            raise ValueError(f"an array of {dtype} cannot be read")
        if kind == "numpy":
            (number,) = numpy.frombuffer(base64.b64decode(value["v"]), dtype)
            return number
        name = value["v"]
        if name in self._arrays:  # each array has a tensor of its own
            raise ValueError(f"the array '{name}' occurs twice")
        self._arrays.add(name)
        raw = self._tensors[name].numpy().tobytes()
        return numpy.frombuffer(raw, dtype).reshape(value["shape"]).copy()


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__} is expected, not a {type(value).__name__}")
    return value


def _decode_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = _expect(torch.dtype, getattr(torch, name, None))
    return dtype


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "complex": lambda parts: complex(*parts),
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: _decode_float(text),
    "str": lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "bytes": base64.b64decode,
    "dtype": _decode_dtype,
    "device": torch.device,
}


def _encode_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    is_default = bits == struct.pack(">d", float(repr(value)))
    return {"$": "float", "v": repr(value) if is_default else "0x" + bits.hex()}


def _decode_float(text: str) -> float:
    if not text.startswith("0x"):
        return float(text)
    number: float = struct.unpack(">d", bytes.fromhex(text[2:]))[0]  # a NaN with a payload
    return number


def _is_text(value: str) -> bool:
    """Return whether JSON restores the string: it would join lone surrogates to a pair."""
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _encode_bytes(value: bytes | str) -> str:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return base64.b64encode(data).decode()


def _is_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(_is_key(k) for k in key))


def _safe_repr(key: Any) -> str:
    try:
        return repr(key)[:_MAX_KEY]
    except Exception:  # a repr may fail; that of a very long integer does
        return f"<{_type_name(type(key))}>"


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


# -- tensors as the bytes of a safetensors file ----------------------------------------------------


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
        """Copy tensors of any device. Tied tensors are copied once."""
        sources = self._lay_out(tensors, shards)
        accelerator = _accelerator()
        for view, source in zip(self._views, sources, strict=True):
            values = source if source.dtype in NATIVE_DTYPES else _as_bytes(source)
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
            if entry.dtype in NATIVE_DTYPES:
                view = view.view(entry.dtype).view(entry.shape)
            self._views.append(view)
            start += entry.bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device. Tied tensors are written once."""
    buffer = TensorBuffer()
    buffer.copy(tensors)
    path.write_bytes(buffer.data)


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
        if entry.dtype not in NATIVE_DTYPES
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
        is_native = entry.dtype in NATIVE_DTYPES
        header[entry.name] = {
            "dtype": NATIVE_DTYPES.get(entry.dtype, "U8"),
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


# -- a copy of a model and a state -----------------------------------------------------------------


@dataclass(frozen=True)
class EncodedState:
    """A state whose Python values are copied, and whose tensors are still those of training."""

    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    tree: Any  # as JSON
    weight_shards: Mapping[str, Shard]
    tensor_shards: Mapping[str, Shard]

    def shards_only(self) -> EncodedState:
        """Return what a rank other than 0 writes: its shards that no rank before it has."""
        weights = {name: one for name, one in self.weight_shards.items() if one.is_first}
        tensors = {name: one for name, one in self.tensor_shards.items() if one.is_first}
        return EncodedState(
            {name: one.values for name, one in weights.items()},
            {name: one.values for name, one in tensors.items()},
            None,
            weights,
            tensors,
        )


@torch.no_grad()
def encode_state(model: Mapping[str, Any], state: Mapping[str, Any]) -> EncodedState:
    """Encode Python values as JSON and collect the tensors."""
    weights = {k: v for k, v in model.items() if isinstance(v, Tensor)}
    for name in weights:
        if name == "__metadata__" or not _is_text(name):
            raise CheckpointError(
                f"A weight is called {name!r}, which the format safetensors does not allow. Rename "
                "the parameter or buffer."
            )
    shards = {name: shard_of(value) for name, value in weights.items() if is_sharded(value)}
    # It raises if a weight cannot be saved; shards of a `DTensor` always can.
    Encoder("model").encode({k: v for k, v in weights.items() if k not in shards})
    weights |= {name: shard.values for name, shard in shards.items()}
    encoder = Encoder("state")
    extra = {k: v for k, v in model.items() if k not in weights}  # from `get_extra_state`
    tree = {"state": encoder.encode(dict(state)), "model": encoder.encode(extra)}
    metadata = getattr(model, "_metadata", None)  # the versions of modules
    if metadata is not None:
        tree["metadata"] = encoder.encode(dict(metadata), "['_metadata']")
    return EncodedState(weights, encoder.tensors, tree, shards, encoder.shards)


def encode_info(info: Mapping[str, Any]) -> Any:
    """Encode a manifest's `info`. Tensors with one element become numbers."""
    return Encoder("info", numbers_only=True).encode(dict(info))


class SnapshotBuffers:
    """Memory for one copy of a state, which is reused for the next one."""

    def __init__(self) -> None:
        self._weights = TensorBuffer()
        self._tensors = TensorBuffer()

    def reserve(self, state: EncodedState) -> None:
        """Allocate the memory for states like this one."""
        self._weights.reserve(state.weights, state.weight_shards)
        self._tensors.reserve(state.tensors, state.tensor_shards)

    def copy(self, state: EncodedState, rank: int = 0) -> dict[str, memoryview]:
        """Copy the tensors of a state; return the contents of their files until the next call."""
        self._weights.copy(state.weights, state.weight_shards)
        self._tensors.copy(state.tensors, state.tensor_shards)
        number = f"-{rank}" if rank else ""
        return {
            f"model{number}.safetensors": self._weights.data,
            f"state{number}.safetensors": self._tensors.data,
        }
