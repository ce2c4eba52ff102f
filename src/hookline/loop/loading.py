"""Loading whole tensors into models and optimizers, which may be sharded; zeroing gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from hookline.tensors.memory import expand_buffers
from hookline.tensors.sharded import is_sharded, shard_like

__all__ = ["load_optimizer", "load_weights", "zero_grad"]


def load_weights(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load whole weights into a model; each process keeps its part of a sharded parameter."""
    expand_buffers(model)
    own = model.state_dict()
    if any(map(is_sharded, own.values())):
        versions = getattr(weights, "_metadata", None)
        weights = OrderedDict((name, _shard(v, own.get(name))) for name, v in weights.items())
        if versions is not None:
            weights._metadata = versions  # type: ignore[attr-defined]
    model.load_state_dict(weights)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state with whole tensors into an optimizer, whose parameters may be sharded."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(is_sharded, parameters)):
        states = {
            index: {name: _shard(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        state = {**state, "state": states}
    optimizer.load_state_dict(dict(state))


def _shard(value: Any, like: Any) -> Any:
    """Return a tensor sharded as another of its shape is, and every other value as it is."""
    tensors = isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor)
    return shard_like(value, like) if tensors and value.shape == like.shape else value


_TORCH_ZERO_GRAD = torch.optim.Optimizer.zero_grad


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Do what `optimizer.zero_grad()` does, about 10 µs faster, without torch's profiling.

    An optimizer that overrides `zero_grad` has its own method called.
    """
    if type(optimizer).zero_grad is not _TORCH_ZERO_GRAD or "zero_grad" in optimizer.__dict__:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
