"""Samples of what an optimizer step uses and changes, taken once for all checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hookline.hooks.lint.training_view import TrainingView

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
        counted: the optimizer's number of steps for the parameter before the step, if a tensor.
        moment: some elements of Adam's first moment before the step.
        after: elements after the step.
    """

    name: str
    parameter: Tensor
    group: Any
    before: Tensor
    gradient: Tensor
    counted: Tensor | None = None
    moment: Tensor | None = None
    after: Tensor = field(default_factory=lambda: torch.empty(0))


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
    for i, (name, p, group) in enumerate(found):
        if i % stride != view.steps_seen % stride and name not in view.suspects:
            continue
        sample = StepSample(name, p, group, view.sample(p), view.sample(p.grad))
        state = getattr(optimizer, "state", {}).get(p, {})
        step, moment = state.get("step"), state.get("exp_avg")
        if isinstance(step, Tensor) and isinstance(moment, Tensor):
            sample.counted, sample.moment = step.clone(), view.sample(moment)
        samples.append(sample)
    return samples
