"""The classes of modules, as the model's author wrote them."""

from __future__ import annotations

from typing import Any

__all__ = ["module_class"]

_WRAPPED = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}


def module_class(module: Any) -> type:
    """Return the class of a module: inside `torch.compile` and DDP, and before FSDP2.

    `fully_shard` gives a module a class of its own, `FSDPBlock` instead of `Block`.
    """
    kind = type(module)
    while kind.__name__ in _WRAPPED and hasattr(module, _WRAPPED[kind.__name__]):
        module = getattr(module, _WRAPPED[kind.__name__])
        kind = type(module)
    bases = kind.__bases__
    is_sharded = len(bases) == 2 and bases[0].__name__ == "FSDPModule"
    return bases[1] if is_sharded else kind
