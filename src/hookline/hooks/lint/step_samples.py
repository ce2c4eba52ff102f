"""Samples of what an optimizer step uses and changes, taken once for all checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hookline.tensors.device_numbers import widest_float
from hookline.tensors.sharded import is_sharded

if TYPE_CHECKING:
    from hookline.hooks.lint.training_view import TrainingView

EXACT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""The optimizers whose updates are computed; a subclass may do anything."""

_MAX_LOOKED_AT = 8  # parameters in a step; others come in the next ones


@dataclass(eq=False)
class StepSample:
    """Some elements of a parameter before and after a step.

    Attributes:
        name: of the parameter, or its place in the optimizer.
        parameter: the parameter itself.
        group: its group in the optimizer.
        before: elements before the step.
        gradient: the same elements of the gradient.
        grad: the gradient's tensor, and `version` its version.
        state: the optimizer's state of the parameter before the step, sampled.
        expected: by how much the elements should decrease; None if that is not known.
        after: elements after the step.
    """

    name: str
    parameter: Tensor
    group: Any
    before: Tensor
    gradient: Tensor
    grad: Tensor
    version: int
    state: dict[str, Any]
    expected: Tensor | None = None
    after: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def is_kept(self) -> bool:
        """Whether the gradient is the one that was sampled before the step."""
        return self.grad is self.parameter.grad and self.grad._version == self.version


@torch.no_grad()
def sample_step(view: TrainingView, optimizer: Any) -> list[StepSample]:
    """Return samples of some of the optimizer's parameters that have a dense gradient.

    Called right before the step. Parameters in `view.suspects` are always among them.
    """
    found: list[tuple[str, Any, Any]] = []
    names = {id(place.tensor): place.name for place in view.parameters}
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is torch.strided and p.numel():
                found.append((names.get(id(p)) or f"parameter {j} of group {i}", p, group))
    stride = -(-len(found) // _MAX_LOOKED_AT) or 1
    samples: list[StepSample] = []
    has_scale = getattr(optimizer, "grad_scale", None) is not None
    is_exact = type(optimizer) in EXACT and steps_alone(optimizer) and not has_scale
    for i, (name, p, group) in enumerate(found):
        if i % stride != view.steps_seen % stride and name not in view.suspects:
            continue
        entry = getattr(optimizer, "state", {}).get(p, {})
        state = {
            key: _copy(view, value) if isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
        sample = StepSample(
            name, p, group, view.sample(p), view.sample(p.grad), p.grad, p.grad._version, state
        )
        if is_exact and _has_same_elements(p, p.grad):
            sample.expected = _expected_change(type(optimizer), sample)
        samples.append(sample)
    return samples


def _copy(view: TrainingView, value: Tensor) -> Tensor:
    """Return elements of a tensor as they are now; a counter of steps is changed by the step."""
    return view.sample(value) if value.ndim else value.clone()


def steps_alone(optimizer: Any) -> bool:
    """Return whether no hook of a user may change parameters in the optimizer's step."""
    hooks: list[Any] = [
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
        *getattr(optimizer, "_optimizer_step_post_hooks", {}).values(),
    ]
    return all((getattr(hook, "__module__", None) or "").startswith("hookline") for hook in hooks)


def _has_same_elements(parameter: Any, gradient: Any) -> bool:
    """Return whether samples of both are of the same elements, and real numbers."""
    if gradient.is_complex() or not parameter.is_floating_point():
        return False
    if not is_sharded(parameter):
        return True
    return is_sharded(gradient) and gradient.placements == parameter.placements


def _expected_change(kind: type, sample: StepSample) -> Tensor:
    wide = widest_float(sample.parameter.device)
    values, gradient = sample.before.to(wide), sample.gradient.to(wide)
    state = {
        key: value.to(wide) if isinstance(value, Tensor) and value.ndim else value
        for key, value in sample.state.items()
    }
    if kind is torch.optim.SGD:
        return _sgd(sample.group, values, gradient, state)
    return _adam(sample.group, values, gradient, state, kind is torch.optim.AdamW)


def _sgd(group: Any, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
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
