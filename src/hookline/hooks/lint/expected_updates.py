"""What torch's SGD, Adam and AdamW should change in a step, and what they have changed."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hookline.hooks.lint.training_view import TrainingView
from hookline.tensors.device_numbers import widest_float
from hookline.tensors.sharded import is_sharded

EXACT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""The optimizers whose updates are computed; a subclass may do anything."""

MAX_LOOKED_AT = 8  # parameters in a step; others have their turn in the next ones


@dataclass(eq=False)
class SampledUpdate:
    """Some elements of a parameter before a step, and by how much they should decrease."""

    name: str
    parameter: Tensor
    before: Tensor
    expected: Tensor
    gradient: Tensor
    version: int  # of the gradient


def trained_parameters(
    view: TrainingView, optimizer: Any, again: Container[str] = ()
) -> list[tuple[str, Tensor, Any]]:
    """Return some of the optimizer's parameters with a dense gradient, with name and group.

    Those whose names are in `again` are among them.
    """
    found: list[tuple[str, Any, Any]] = []
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and parameter.numel():
                found.append((f"parameter {j} of group {i}", parameter, group))
    stride = -(-len(found) // MAX_LOOKED_AT) or 1
    names = {id(place.tensor): place.name for place in view.parameters}
    named = [(names.get(id(p)) or name, p, group) for name, p, group in found]
    turn = view.steps_seen % stride
    return [row for i, row in enumerate(named) if i % stride == turn or row[0] in again]


def is_computable(optimizer: Any) -> bool:
    """Return whether nothing but the optimizer itself changes parameters in its step."""
    hooks: list[Any] = [
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
        *getattr(optimizer, "_optimizer_step_post_hooks", {}).values(),
    ]
    return (
        type(optimizer) in EXACT
        and getattr(optimizer, "grad_scale", None) is None
        and all((getattr(hook, "__module__", None) or "").startswith("hookline") for hook in hooks)
    )


@torch.no_grad()
def sample_updates(
    view: TrainingView,
    optimizer: Any,
    dtypes: tuple[torch.dtype, ...],
    again: Container[str] = (),
) -> list[SampledUpdate]:
    """Return the expected updates of some parameters; called right before the step."""
    updates = []
    for name, parameter, group in trained_parameters(view, optimizer, again):
        gradient, state = parameter.grad, optimizer.state.get(parameter, {})
        if parameter.dtype not in dtypes or gradient is None or gradient.is_complex():
            continue
        if is_sharded(parameter) and (
            not is_sharded(gradient) or gradient.placements != parameter.placements  # type: ignore[attr-defined]
        ):
            continue
        wide = widest_float(parameter.device)
        before = view.sample(parameter)
        values = before.to(wide)
        moments = {
            key: value
            if key == "step" or not isinstance(value, Tensor)
            else view.sample(value).to(wide)
            for key, value in state.items()
        }
        compute = _sgd if type(optimizer) is torch.optim.SGD else _adam
        is_decoupled = type(optimizer) is torch.optim.AdamW
        expected = compute(group, values, view.sample(gradient).to(wide), moments, is_decoupled)
        updates.append(
            SampledUpdate(name, parameter, before, expected, gradient, gradient._version)
        )
    return updates


def _sgd(group: Any, p: Tensor, gradient: Tensor, state: Any, is_decoupled: bool) -> Tensor:
    change = (-gradient if group["maximize"] else gradient) + group["weight_decay"] * p
    momentum = group["momentum"]
    if momentum:
        old = state.get("momentum_buffer")
        buffer = change if old is None else momentum * old + (1 - group["dampening"]) * change
        change = change + momentum * buffer if group["nesterov"] else buffer
    update: Tensor = group["lr"] * change
    return update


def _adam(group: Any, p: Tensor, gradient: Tensor, state: Any, is_decoupled: bool) -> Tensor:
    is_decoupled = group.get("decoupled_weight_decay", is_decoupled)
    decay, lr, (beta1, beta2) = group["weight_decay"], group["lr"], group["betas"]
    gradient = -gradient if group["maximize"] else gradient
    if not is_decoupled:
        gradient = gradient + decay * p
    zeros = torch.zeros_like(p)
    first = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * gradient
    second = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * gradient * gradient
    step = state.get("step", 0) + 1
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    if group["amsgrad"]:
        second = torch.maximum(state.get("max_exp_avg_sq", zeros), second)
    change: Tensor = lr * (first / correction1) / ((second / correction2).sqrt() + group["eps"])
    return change + lr * decay * p if is_decoupled else change
