"""Which of many tensors has a value that is not finite, with one transfer from the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from hookline.tensors.sharded import is_sharded

__all__ = ["all_finite", "first_bad", "tensors_in"]


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite. This waits for the device, once.

    Norms are ten times as fast as looking at each value. A norm can overflow where no value does,
    so when one is not finite the values decide.
    """
    parts = _parts(tensors)
    if not parts:
        return True
    norms = cast(Any, torch)._foreach_norm(parts)
    return bool(_together(list(norms)).isfinite().all()) or not any(_bad(parts))


def first_bad(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor with a value that is not finite, and what it has."""
    pairs = [(name, part) for name, tensor in named for part in _parts([tensor])]
    for (name, part), bad in zip(pairs, _bad([part for _, part in pairs]), strict=True):
        if bad:
            nans, infinite = part.isnan().sum(), part.isinf().sum()
            return f"'{name}' ({int(nans)} NaN and {int(infinite)} Inf of {part.numel()})"
    return None


def tensors_in(value: Any, name: str = "batch", depth: int = 4) -> Iterable[tuple[str, Any]]:
    """Yield the tensors of a batch, each with the way to it: `batch['x'][0]`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping) and depth:
        for key, item in value.items():
            yield from tensors_in(item, f"{name}[{key!r}]", depth - 1)
    elif isinstance(value, list | tuple) and depth:
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{i}]", depth - 1)


def _parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as they can be looked at: values that can be infinite, of this rank."""
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        part = tensor.detach()
        if is_sharded(part):
            part = cast(Any, part).to_local()  # each rank looks at its own: nobody waits for others
        if part.layout == torch.sparse_coo:
            part = part.coalesce().values()
        if part.numel() and (part.is_floating_point() or part.is_complex()):
            parts.append(part)
    return parts


def _bad(parts: list[torch.Tensor]) -> list[bool]:
    if not parts:
        return []
    flags = _together([part.isfinite().all() for part in parts])
    return cast("list[bool]", flags.logical_not().tolist())


def _together(scalars: list[torch.Tensor]) -> torch.Tensor:
    """Scalars as one tensor; those of a model on several devices meet on the first one's."""
    device = scalars[0].device
    return torch.stack([one if one.device == device else one.to(device) for one in scalars])
