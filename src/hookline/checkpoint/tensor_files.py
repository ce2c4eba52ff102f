"""Named tensors of every dtype in a safetensors file.

Any safetensors reader can read the file. Its metadata has, as JSON, what the format lacks:
`hookline.same` maps the names of tied weights to the tensor that is written, and `hookline.viewed`
has the dtype and shape of tensors that are written as bytes, because the format lacks their dtype.
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
    """Write tensors of any device. Tied tensors are written once."""
    first_names: dict[Any, str] = {}
    written: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    viewed: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        key = _memory_key(tensor, name)
        if first_names.setdefault(key, name) != name:
            same[name] = first_names[key]
            continue
        values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if values.dtype not in _NATIVE:
            viewed[name] = [str(values.dtype).removeprefix("torch."), list(values.shape)]
            values = values.reshape(-1).view(torch.uint8)
        written[name] = values
    metadata = {"format": "pt"}
    if same:
        metadata["hookline.same"] = json.dumps(same)
    if viewed:
        metadata["hookline.viewed"] = json.dumps(viewed)
    path.touch()
    mode = path.stat().st_mode
    save_file(unshared(written), path, metadata=metadata)  # sets the mode to 0600
    path.chmod(mode)


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Return all tensors of a file, copied to memory: the file may be removed afterwards."""
    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        viewed = json.loads(metadata.get("hookline.viewed", "{}"))
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            tensor: Tensor = file.get_tensor(name).clone()  # it is a memory map of the file
            if name in viewed:
                dtype, shape = viewed[name]
                tensor = tensor.view(getattr(torch, dtype)).reshape(shape)
            tensors[name] = tensor.to(device)
    for name, other in json.loads(metadata.get("hookline.same", "{}")).items():
        tensors[name] = tensors[other]
    return tensors


def _memory_key(tensor: Tensor, name: str) -> Any:
    """Return a key that is equal for two tensors in the same memory."""
    if tensor.numel() == 0:
        return name
    memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return (*memory, tensor.is_conj(), tensor.is_neg())
