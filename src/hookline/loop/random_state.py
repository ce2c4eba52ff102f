"""The states of all random generators that training may use."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

_HOLDERS = ("dataset", "sampler", "batch_sampler")  # attributes of loaders and samplers

__all__ = ["generators_of", "random_state", "restore_random_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python, numpy (if it is imported) and torch, on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all global generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), position, has_gauss, gauss)
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned."""
    random.setstate(_tuples(state["python"]))
    torch.set_rng_state(state["torch"].cpu())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators of loaders, their samplers and datasets, without the global ones."""
    found: list[torch.Generator] = []
    for loader in loaders:
        _add_generators(loader, found, set())
    return found


def _add_generators(holder: Any, found: list[torch.Generator], seen: set[int]) -> None:
    seen.add(id(holder))
    for name, value in getattr(holder, "__dict__", {}).items():
        if isinstance(value, torch.Generator) and value not in found:
            found.append(value)
        elif name.lstrip("_") in _HOLDERS and id(value) not in seen:
            _add_generators(value, found, seen)
