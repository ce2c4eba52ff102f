"""Digests of values, which are equal only if the values are equal bit for bit."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from hookline.tensors.nested import named_tensors

__all__ = ["digest_tensor", "digest_value", "flatten_state"]

_ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device)


@torch.no_grad()
def digest_tensor(tensor: Tensor) -> str:
    """Return the type, the shape and a hash of a tensor's values; waits for its device."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = values.cpu().resolve_conj().resolve_neg().contiguous()
    size = values.numel() * values.element_size()
    memory: Any = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    kind = str(values.dtype).removeprefix("torch.")
    return f"{kind}{list(values.shape)} {xxhash.xxh3_64_hexdigest(memory)}"


def digest_value(value: Any) -> str:
    """Return a hash of a nested value, such as a batch or random states."""
    if isinstance(value, Tensor):
        return digest_tensor(value)
    return xxhash.xxh3_64_hexdigest(repr(flatten_state(value)).encode())  # `repr` escapes


def flatten_state(value: Any, name: str = "", *, plain_only: bool = False) -> dict[str, str]:
    """Return a nested value as text by dotted path: numbers in full, tensors as digests.

    Args:
        value: A state, an attribute or a batch.
        name: The path of the value itself.
        plain_only: Omit other objects, instead of including the tensors in them.
    """
    return dict(_flatten(value, name, plain_only, depth=0))


def _flatten(value: Any, name: str, plain_only: bool, depth: int) -> Iterator[tuple[str, str]]:
    prefix = f"{name}." if name else ""
    if isinstance(value, Tensor):
        yield name, digest_tensor(value)
    elif isinstance(value, float):
        yield name, "nan" if value != value else value.hex()
    elif isinstance(value, _ATOMS):
        yield name, repr(value)
    elif isinstance(value, torch.Generator):
        yield name, digest_tensor(value.get_state())
    elif isinstance(value, Mapping) and depth < 20:
        yield name, f"{len(value)} keys"
        for key, inner in list(value.items()):
            yield from _flatten(inner, f"{prefix}{key}", plain_only, depth + 1)
    elif isinstance(value, list | tuple | deque) and depth < 20:
        yield name, f"{len(value)} items"
        for i, inner in enumerate(list(value)):
            yield from _flatten(inner, f"{prefix}{i}", plain_only, depth + 1)
    elif hasattr(value, "__array__") and hasattr(value, "dtype"):
        array: Any = value  # of numpy
        yield name, f"{array.dtype}{list(array.shape)} {xxhash.xxh3_64_hexdigest(array.tobytes())}"
    elif not plain_only:
        for inner_name, tensor in named_tensors(value, name):
            yield inner_name, digest_tensor(tensor)
