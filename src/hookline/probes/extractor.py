"""How a probe takes a tensor: a part of it, reduced, in another dtype, elsewhere, by copy or not.

Everything is done without waiting for the device. What a copy to the CPU still needs, and whether a
reference is still what it was, is found out when somebody reads it: see `late.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from hookline.errors import ConfigError, HookFailedError, ProbeError, listed, nearest
from hookline.hook import Hook
from hookline.probes.captured_state import Check
from hookline.probes.tensor_index import as_index
from hookline.tensors.nested import map_tensors
from hookline.tensors.observation import Observation

__all__ = ["REDUCTIONS", "By", "TensorExtractor"]

By = Literal["copy", "reference"]

_Dims = int | tuple[int, ...] | None
REDUCTIONS: dict[str, Callable[[Tensor, _Dims], Tensor]] = {
    "mean": lambda x, dim: torch.mean(_real(x), dim),
    "sum": lambda x, dim: torch.sum(x, dim),
    "std": lambda x, dim: torch.std(_real(x), dim),
    "norm": lambda x, dim: torch.linalg.vector_norm(_real(x), dim=dim),
    "max": lambda x, dim: torch.amax(x, _all(dim)),
    "min": lambda x, dim: torch.amin(x, _all(dim)),
    "abs_max": lambda x, dim: torch.amax(x.abs(), _all(dim)),
}
"""What `reduce` may be called, each over some dimensions or all."""


class TensorExtractor:
    """Takes tensors out of what flows through a module.

    Args:
        who: the probe, for messages.
        by: whether to copy.
        device: where to.
        dtype: what floating-point tensors become.
        select: an index, or a function.
        reduce: the name of a reduction, or a function.
        dim: the dimensions that are reduced; None for all.
    """

    def __init__(
        self,
        who: Hook,
        by: By = "copy",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        select: Any = None,
        reduce: str | Callable[[Tensor], Tensor] | None = None,
        dim: int | list[int] | tuple[int, ...] | None = None,
    ) -> None:
        self._who = who
        self._by: By = by
        self._device = None if device is None else _device(device)
        self._dtype = None if dtype is None else _dtype(dtype)
        self._select = select if select is None or callable(select) else _index(select)
        self._reduce = _reduction(reduce)
        self._dim = tuple(dim) if isinstance(dim, list) else dim
        if dim is not None and not isinstance(reduce, str):
            raise ConfigError("dim goes with a named reduction, such as reduce='mean'.")
        self.at_once = by == "copy" and self._device is None
        """Whether all is settled when it is taken."""
        self.plain = self.at_once and dtype is None and select is None and reduce is None
        """Whether a tensor is copied as it is."""

    def __call__(self, value: Any, name: str, *, copy: bool = False) -> tuple[Any, Check | None]:
        """Take the tensors within a value.

        Args:
            value: what a module took or gave.
            name: the module's name, for messages.
            copy: whether it has to be copied in any case: its memory is used again.

        Returns:
            The value with what was taken instead of its tensors, and what to do before reading it.
        """
        if self.plain:
            return map_tensors(value, _copied), None
        by: By = "copy" if copy else self._by
        checks: list[Check] = []
        taken = map_tensors(value, lambda tensor: self._take(tensor, name, by, checks))
        return taken, _all_of(checks) if checks else None

    def _take(self, tensor: Tensor, name: str, by: By, checks: list[Check]) -> Tensor:
        try:
            return self._taken(tensor, name, by, checks)
        except (HookFailedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ProbeError(
                f"'{name}' has a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype}, "
                f"which cannot be taken as asked: {type(error).__name__}: {error}. Give `select` a "
                "function that can tell, or choose other modules."
            ) from error

    def _taken(self, tensor: Tensor, name: str, by: By, checks: list[Check]) -> Tensor:
        part = source = tensor.detach()
        if self._select is not None:
            part = self._apply(self._select, part, name, "select")
        if self._reduce is not None:
            part = self._apply(self._reduce, part, name, "reduce")
        if self._dtype is not None and part.is_floating_point():
            part = part.to(self._dtype)
        if self._device is not None:
            part = _moved(part, self._device, checks)
        if not _shares(part, source):
            return part
        if by == "copy" or source.is_inference():  # there, a change leaves no trace
            return part.clone()
        checks.append(_unchanged(part, name))
        return part

    def _apply(self, what: Any, tensor: Tensor, name: str, option: str) -> Tensor:
        if isinstance(what, str):
            return REDUCTIONS[what](tensor, self._dim)
        if not callable(what):
            return tensor[what]
        returned: list[Any] = []
        look = Observation(tensor, f"a tensor of '{name}'")
        look.carry(self._who, lambda: returned.append(what(tensor)), (), {})
        if not isinstance(returned[0], Tensor):
            raise TypeError(f"{option} returned a {type(returned[0]).__name__}, not a tensor")
        return returned[0].detach()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _moved(tensor: Tensor, device: torch.device, checks: list[Check]) -> Tensor:
    """The tensor on another device, without waiting for it to arrive."""
    here = tensor.device
    leaves = device.type == "cpu" and here.type in ("cuda", "xpu")
    if not leaves or tensor.layout is not torch.strided:
        return tensor.to(device)
    landed = torch.empty_like(tensor, device=device, pin_memory=True)
    landed.copy_(tensor, non_blocking=True)
    arrived = torch.Event(device=here)
    arrived.record(torch.accelerator.current_stream(here))
    checks.append(arrived.synchronize)
    return landed


def _unchanged(tensor: Tensor, name: str) -> Check:
    version = tensor._version

    def check() -> None:
        if tensor._version != version:
            raise ProbeError(
                f"What was captured of '{name}' by reference has been changed in place since: it "
                "is not what flowed through the module any more. Capture it with by='copy'."
            )

    return check


def _all_of(checks: list[Check]) -> Check:
    def check() -> None:
        for one in checks:
            one()

    return checks[0] if len(checks) == 1 else check


def _shares(tensor: Tensor, source: Tensor) -> bool:
    """Whether they have the same memory; if that cannot be told, yes."""
    if tensor is source:
        return True
    try:
        return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return True


def _real(tensor: Tensor) -> Tensor:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.to(torch.get_default_dtype()) if whole else tensor


def _all(dim: _Dims) -> Any:
    return () if dim is None else dim


# -- options --------------------------------------------------------------------------------------


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: {str(error).splitlines()[0]}") from error


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        names = [name for name, one in vars(torch).items() if isinstance(one, torch.dtype)]
        raise ConfigError(f"dtype: torch has no dtype {dtype!r}.{nearest(dtype, names)}")
    return found


def _reduction(reduce: Any) -> Any:
    if isinstance(reduce, str) and reduce not in REDUCTIONS:
        there = f"There are {listed(REDUCTIONS)}, or give a function."
        raise ConfigError(f"reduce: {reduce!r} is none.{nearest(reduce, REDUCTIONS)} {there}")
    return reduce


def _index(select: Any) -> Any:
    try:
        return as_index(select)
    except ConfigError as error:
        raise ConfigError(str(error).replace("at=", "select=", 1)) from None
