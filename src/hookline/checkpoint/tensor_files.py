"""Named tensors in a safetensors file, of every dtype, tied ones written once.

Any reader of safetensors reads the file. Two things it does not have stand in its metadata, as
JSON: `hookline.same`, names of tensors that are another one (tied weights), and `hookline.viewed`,
dtype and shape of tensors whose dtype the format lacks, which are written as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hookline.tensors.memory import unshared

__all__ = ["read_tensors", "write_tensors"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NATIVE = {*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device; the call waits until their values are there."""
    first: dict[Any, str] = {}
    written: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    viewed: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        key = _identity(tensor, name)
        if first.setdefault(key, name) != name:
            same[name] = first[key]
            continue
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if plain.dtype not in _NATIVE:
            viewed[name] = [str(plain.dtype).removeprefix("torch."), list(plain.shape)]
            plain = plain.reshape(-1).view(torch.uint8)
        written[name] = plain
    metadata = {"format": "pt"}
    if same:
        metadata["hookline.same"] = json.dumps(same)
    if viewed:
        metadata["hookline.viewed"] = json.dumps(viewed)
    path.touch()
    mode = path.stat().st_mode
    save_file(unshared(written), path, metadata=metadata)  # makes it readable to its owner only
    path.chmod(mode)


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Read all tensors into memory of their own: the file may go away afterwards."""
    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        viewed = json.loads(metadata.get("hookline.viewed", "{}"))
        for name in file.keys():  # noqa: SIM118 - no mapping
            tensor: Tensor = file.get_tensor(name).clone()  # a clone: it is mapped from the file
            if name in viewed:
                dtype, shape = viewed[name]
                tensor = tensor.view(getattr(torch, dtype)).reshape(shape)
            tensors[name] = tensor.to(device)
    for name, other in json.loads(metadata.get("hookline.same", "{}")).items():
        tensors[name] = tensors[other]
    return tensors


def _identity(tensor: Tensor, name: str) -> Any:
    """Return what two names of the very same memory have in common."""
    if tensor.numel() == 0:
        return name
    where = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return (*where, tensor.is_conj(), tensor.is_neg())
