"""A captured state on disk: its tensors in a safetensors file, everything else in memory.

Tensors are read back on their device, with their dtype, bit for bit. Views, and tensors that shared
memory, become tensors of their own, without the graph that made them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hookline.errors import HooklineError
from hookline.probes.captured_state import CONTENTS, CapturedState, shape_text
from hookline.tensors.memory import unshared
from hookline.tensors.nested import map_tensors

__all__ = ["SpillError", "SpilledState", "write_state"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NATIVE = {*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


class SpillError(Exception):
    """A state cannot be written; the message says why. The store handles it."""


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity, as tensors are
class _Placeholder:
    """Takes the place of a tensor that is in the file."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    cls: type[Tensor]
    attributes: dict[str, Any]

    def __repr__(self) -> str:
        return shape_text(self)


class SpilledState(NamedTuple):
    """A state whose tensors are in a file."""

    path: Path
    metadata: CapturedState
    """The state with placeholders instead of tensors."""

    def read(self) -> CapturedState:
        """Return the state with its tensors, in memory of their own."""
        try:
            with safe_open(self.path, framework="pt") as file:
                return _map_contents(self.metadata, lambda p: _load(file, p), _Placeholder)
        except (OSError, SafetensorError) as error:
            raise HooklineError(
                f"Cannot read a captured state of '{self.metadata.module}' back from {self.path}: "
                f"{error}. Nothing else may change or remove files in that folder."
            ) from error

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def write_state(state: CapturedState, path: Path) -> SpilledState:
    """Write a state's tensors to a new file.

    Raises:
        SpillError: The disk is full, or a tensor cannot be represented in the file.
    """
    tensors: dict[str, Tensor] = {}
    metadata = _map_contents(state, lambda tensor: _add_tensor(tensor, tensors), Tensor)
    header = {"module": state.module, "probe": state.probe, "step": str(state.step)}
    try:
        save_file(unshared(tensors), path, metadata=header)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        raise SpillError(f"{path} could not be written: {error}") from error
    return SpilledState(path, metadata)


def _map_contents(state: CapturedState, function: Any, leaf: type) -> CapturedState:
    memo: dict[int, tuple[Any, Any]] = {}  # one for all: a tensor in several places stays one
    contents = {name: map_tensors(getattr(state, name), function, memo, leaf) for name in CONTENTS}
    return replace(state, **contents)


def _add_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> _Placeholder:
    cls = Tensor if isinstance(tensor, torch.nn.Parameter) else type(tensor)
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
        or hasattr(tensor, "__tensor_flatten__")  # made of other tensors, such as DTensor
    ):
        raise SpillError(f"a {cls.__name__} ({tensor.layout}, {tensor.dtype}) cannot be written")
    name = f"t{len(tensors)}"
    attributes = {} if cls is Tensor else dict(vars(tensor))
    plain = tensor.as_subclass(Tensor).detach().resolve_conj().resolve_neg().cpu().contiguous()
    is_native = plain.dtype in _NATIVE  # others are written as bytes
    tensors[name] = plain if is_native else plain.reshape(-1).view(torch.uint8)
    return _Placeholder(name, plain.dtype, plain.shape, tensor.device, cls, attributes)


def _load(file: Any, placeholder: _Placeholder) -> Tensor:
    tensor: Tensor = file.get_tensor(placeholder.name).clone()  # it is mapped from the file
    tensor = tensor.view(placeholder.dtype).reshape(placeholder.shape).to(placeholder.device)
    if placeholder.cls is not Tensor:
        tensor = tensor.as_subclass(placeholder.cls)
        vars(tensor).update(placeholder.attributes)
    return tensor
