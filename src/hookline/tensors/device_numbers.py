"""Reading numbers from the device with one transfer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device; Apple's MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_tensors(values: Iterable[Any]) -> list[Any]:
    """Return tensors as numbers or lists of numbers; anything else is returned as it is.

    All tensors on accelerators are read with one transfer, so this waits for the device once.
    Every number comes back as a float: a scalar tensor as a float, a vector as a list, a matrix as
    a list of rows.
    """
    values = list(values)
    by_kind: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for position, value in enumerate(values):
        if type(value) is Tensor or isinstance(value, Tensor):
            by_kind.setdefault((value.device, value.dtype, value.ndim == 0), []).append(position)
    for on_cpu in (True, False):
        kinds = {kind: at for kind, at in by_kind.items() if (kind[0].type == "cpu") is on_cpu}
        if kinds:
            _read_into(values, kinds)
    return values


def _read_into(
    values: list[Any], kinds: dict[tuple[torch.device, torch.dtype, bool], list[int]]
) -> None:
    """Replace the tensors at these positions by their numbers, with one transfer."""
    home = next(iter(kinds))[0]
    # One tensor per type: converting them one by one would launch a kernel for each.
    vectors = [
        _join([values[at] for at in positions], scalars=kind[2]).to(home)
        for kind, positions in kinds.items()
    ]
    dtype = torch.float64 if torch.float64 in {v.dtype for v in vectors} else torch.float32
    numbers: list[float] = torch.cat([vector.to(dtype) for vector in vectors]).tolist()
    start = 0
    for (_, _, scalars), positions in kinds.items():
        if scalars:
            for at, number in zip(positions, numbers[start : start + len(positions)], strict=True):
                values[at] = number
            start += len(positions)
            continue
        for at in positions:
            end = start + values[at].numel()
            values[at] = _unflatten(numbers[start:end], values[at].shape)
            start = end


def _join(tensors: list[Tensor], *, scalars: bool) -> Tensor:
    """Join tensors of one type into a vector of a floating-point type that holds them exactly."""
    joined = torch.stack(tensors) if scalars else torch.cat([t.reshape(-1) for t in tensors])
    joined = joined.detach()
    if joined.is_floating_point():
        return joined if joined.dtype == torch.float64 else joined.float()
    return joined.to(widest_float(joined.device))


def _unflatten(numbers: list[float], shape: torch.Size) -> list[Any]:
    if len(shape) == 1:
        return numbers
    width = len(numbers) // max(shape[0], 1)
    return [_unflatten(numbers[i * width : (i + 1) * width], shape[1:]) for i in range(shape[0])]
