"""A captured state on disk: its tensors in a safetensors file, everything else stays in memory.

Tensors come back on their device, with their dtype and values bit for bit; views, and tensors that
shared memory, as tensors of their own, and without the graph that made them.
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
from hookline.probes.captured_state import CONTENTS, CapturedState, shape_of
from hookline.tensors.memory import unshared
from hookline.tensors.nested import map_tensors

__all__ = ["CannotSpill", "Spilled", "write"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NATIVE = {*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


class CannotSpill(Exception):  # noqa: N818 - said and done with within the store
    """A state cannot be written; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)  # hashed as itself, as tensors are
class _Slot:
    """Stands where a tensor was."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    kind: type[Tensor]
    attributes: dict[str, Any]

    def __repr__(self) -> str:
        return shape_of(self)


class Spilled(NamedTuple):
    """A state whose tensors stand in a file."""

    path: Path
    shell: CapturedState
    """The state with something else in its tensors' places."""

    def read(self) -> CapturedState:
        """Return the state as it was, in memory of its own."""
        try:
            with safe_open(self.path, framework="pt") as file:
                memo: dict[int, tuple[Any, Any]] = {}
                return _mapped(self.shell, lambda slot: _load(file, slot), memo, _Slot)
        except (OSError, SafetensorError) as error:
            raise HooklineError(
                f"A captured state of '{self.shell.module}' was written to {self.path} and cannot "
                f"be read back: {error}. Nothing else may change or remove files in that folder."
            ) from error

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def write(state: CapturedState, path: Path) -> Spilled:
    """Write a state's tensors to a new file.

    Raises:
        CannotSpill: The disk is full or a tensor's kind has no place in such a file.
    """
    tensors: dict[str, Tensor] = {}
    shell = _mapped(state, lambda tensor: _store(tensor, tensors), {}, Tensor)
    said = {"module": state.module, "probe": state.probe, "step": str(state.step)}
    try:
        save_file(unshared(tensors), path, metadata=said)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        raise CannotSpill(f"{path} could not be written: {error}") from error
    return Spilled(path, shell)


def _mapped(
    state: CapturedState, f: Any, memo: dict[int, tuple[Any, Any]], leaf: type
) -> CapturedState:
    # One memo for all: a tensor that stands in several places stays one tensor.
    contents = {name: map_tensors(getattr(state, name), f, memo, leaf) for name in CONTENTS}
    return replace(state, **contents)


def _store(tensor: Tensor, tensors: dict[str, Tensor]) -> _Slot:
    kind = Tensor if isinstance(tensor, torch.nn.Parameter) else type(tensor)
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
        or hasattr(tensor, "__tensor_flatten__")  # made of other tensors, such as DTensor
    ):
        raise CannotSpill(f"a {kind.__name__} ({tensor.layout}, {tensor.dtype}) cannot be written")
    name = f"t{len(tensors)}"
    attributes = {} if kind is Tensor else dict(vars(tensor))
    plain = tensor.as_subclass(Tensor).detach().resolve_conj().resolve_neg().cpu().contiguous()
    native = plain.dtype in _NATIVE  # the others are written as bytes
    tensors[name] = plain if native else plain.reshape(-1).view(torch.uint8)
    return _Slot(name, plain.dtype, plain.shape, tensor.device, kind, attributes)


def _load(file: Any, slot: _Slot) -> Tensor:
    tensor: Tensor = file.get_tensor(slot.name).clone()  # a clone: it is mapped from the file
    tensor = tensor.view(slot.dtype).reshape(slot.shape).to(slot.device)
    if slot.kind is not Tensor:
        tensor = tensor.as_subclass(slot.kind)
        vars(tensor).update(slot.attributes)
    return tensor
