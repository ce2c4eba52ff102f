"""The classes of modules, as the model's author wrote them."""

from __future__ import annotations

from typing import Any

_WRAPPED = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}


def module_class(module: Any) -> type:
    """Return the class of a module: inside `torch.compile` and DDP, and before FSDP2.

    `fully_shard` gives a module a class of its own, `FSDPBlock` instead of `Block`.
    """
    module = unwrap_module(module)
    kind = type(module)
    return kind.__bases__[1] if is_fsdp_module(module) else kind


def unwrap_module(module: Any) -> Any:
    """Return the module inside `torch.compile` and DDP."""
    while (inner := _WRAPPED.get(type(module).__name__)) is not None and hasattr(module, inner):
        module = getattr(module, inner)
    return module


def is_fsdp_module(module: Any) -> bool:
    """Return whether `fully_shard` was called with a module itself."""
    bases = type(module).__bases__
    return len(bases) == 2 and bases[0].__name__ == "FSDPModule"
