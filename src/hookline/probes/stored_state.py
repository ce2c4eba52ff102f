"""A stored state, in memory or on disk, and what the store knows of each probe.

A state on disk has its tensors in a safetensors file and everything else in memory. Tensors are
read back on their device, with their dtype, bit for bit. Views, and tensors that shared memory,
become tensors of their own, without the graph that made them.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hookline.arguments import user_path
from hookline.errors import ConfigError, HooklineError
from hookline.probes.captured_state import CONTENTS, CapturedState, shape_text
from hookline.tensors.memory import unshared
from hookline.tensors.nested import map_tensors

__all__ = [
    "Counts",
    "ProbeStates",
    "SpillError",
    "SpilledState",
    "StorageCounter",
    "StoredState",
    "make_folder",
    "remove_folder",
    "write_state",
]

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


class Counts(NamedTuple):
    """How many states a probe has captured, and where they are: `captured` is the sum."""

    captured: int = 0
    kept: int = 0
    """In memory now."""
    spilled: int = 0
    """On disk now."""
    dropped: int = 0
    """Did not fit."""
    cleared: int = 0
    """Removed by `clear`."""


@dataclass(slots=True, eq=False)
class StoredState:
    """One state, in memory or on disk."""

    key: int
    state: CapturedState | SpilledState
    storages: dict[Any, tuple[int, Any]]  # keeps the memory alive until it is released
    nbytes: int
    rank: float = 0.0  # random; a sample keeps the lowest

    @property
    def metadata(self) -> CapturedState:
        """The state; if it is on disk, with placeholders instead of tensors."""
        return self.state.metadata if isinstance(self.state, SpilledState) else self.state

    def read(self) -> CapturedState:
        """Return the state, from disk if it is there."""
        return self.state.read() if isinstance(self.state, SpilledState) else self.state


@dataclass(slots=True, eq=False)
class ProbeStates:
    """The states of one probe, oldest first."""

    probe: str
    random: random.Random
    memory: OrderedDict[int, StoredState] = field(default_factory=OrderedDict[int, StoredState])
    disk: dict[int, StoredState] = field(default_factory=dict[int, StoredState])
    highest: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # a heap
    below: float = math.inf  # a sample takes only ranks below this
    nbytes: int = 0  # of each state by itself
    since_cleanup: int = 0
    captured: int = 0
    dropped: int = 0
    over_memory: int = 0  # of those dropped: because of the limit on bytes
    over_total: int = 0  # because of the limit on the states of all probes together
    cleared: int = 0
    warned: bool = False

    def counts(self) -> Counts:
        """Return how many states there were, and where they are."""
        return Counts(self.captured, len(self.memory), len(self.disk), self.dropped, self.cleared)


class StorageCounter:
    """Counts the bytes that states keep alive, each storage once, however many states share it.

    The caller of `hold` has to keep the storages alive until it calls `release`. Otherwise their
    address might be reused and be taken for the same memory.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._holders: dict[Any, int] = {}  # the number of states, by storage

    def hold(self, storages: Mapping[Any, tuple[int, Any]]) -> None:
        """Count the storages of a state, as `hookline.tensors.memory.storages` returns them."""
        for key, (size, _) in storages.items():
            holders = self._holders.get(key, 0)
            self._holders[key] = holders + 1
            if not holders:
                self.nbytes += size

    def release(self, storages: Mapping[Any, tuple[int, Any]]) -> None:
        """Undo one `hold`."""
        for key, (size, _) in storages.items():
            holders = self._holders[key] - 1
            if holders:
                self._holders[key] = holders
            else:
                del self._holders[key]
                self.nbytes -= size

    def count_new(self, storages: Mapping[Any, tuple[int, Any]]) -> int:
        """Return how many bytes `hold` would add."""
        return sum(size for key, (size, _) in storages.items() if key not in self._holders)


def make_folder(parent: str | os.PathLike[str] | None) -> Path:
    """Return a new folder for spilled states; None stands for the system's temporary files."""
    try:
        if parent is not None:
            parent = user_path(parent)
            parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="hookline-probes-", dir=parent))
    except OSError as error:
        raise ConfigError(f"Cannot write to the folder {parent}: {error}.") from error


def remove_folder(folder: Path | None, process: int) -> None:
    """Remove a folder of spilled states, unless this is a fork of the process that made it."""
    if folder is not None and os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


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
