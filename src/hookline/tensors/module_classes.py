"""The classes of modules, as the model's author wrote them."""

from __future__ import annotations

from typing import Any

__all__ = ["is_fsdp_module", "module_class"]

_WRAPPED = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}


def module_class(module: Any) -> type:
    """Return the class of a module: inside `torch.compile` and DDP, and before FSDP2.

    `fully_shard` gives a module a class of its own, `FSDPBlock` instead of `Block`.
    """
    kind = type(module)
    while kind.__name__ in _WRAPPED and hasattr(module, _WRAPPED[kind.__name__]):
        module = getattr(module, _WRAPPED[kind.__name__])
        kind = type(module)
    return kind.__bases__[1] if is_fsdp_module(module) else kind


def is_fsdp_module(module: Any) -> bool:
    """Return whether `fully_shard` was called with a module itself."""
    bases = type(module).__bases__
    return len(bases) == 2 and bases[0].__name__ == "FSDPModule"
