"""Sharpness: measures the curvature of the loss along the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from hookline.errors import HookConfigError
from hookline.hook import HookGroup
from hookline.loop.processes import world_size
from hookline.loop.random_state import random_state, restore_random_state
from hookline.options import BuiltIn
from hookline.tensors.global_norm import global_norm
from hookline.tensors.reading import read_tensors, widest_float
from hookline.tensors.sharded import is_sharded

__all__ = ["Sharpness"]


class Sharpness(BuiltIn):
    """Measures the curvature of the loss along the gradient, gᵀHg / gᵀg.

    A step of gradient descent lowers the loss, to second order, while the learning rate is below 2
    divided by it (see arXiv 2604.14108). The Hessian is not computed: the gradient is computed once
    more, at weights that are moved a little along the gradient, and the difference of the two is
    divided by the distance. So it works with fused attention, which has no second derivative.

    The batch is that of the step, with the same dropout. If a step has several batches, it is the
    last one of them, and its gradient at the unmoved weights is computed again, too. Weights,
    gradients, buffers, the scaler and random states are afterwards what they were, and other hooks
    and probes do not see the additional calls of the model; `step_fn` or `loss_fn` is called once
    more. With DDP, the value is that of all processes' batches together.

    Logged are `sharpness/along_gradient`, and `sharpness/times_lr`, its product with the learning
    rate of the first optimizer. A value that is not finite is not logged.

    Hookline's own trainer is needed, since other loops cannot compute the loss of a batch again.
    Sharded (FSDP2) and half-precision parameters are refused; mixed precision works, with the
    precision of its gradients.

    Args:
        log_frequency: measure every N optimizer steps.
        distance: how far the weights are moved, relative to their norm.
    """

    cost = (
        "Nothing in steps without a report. In those, one more forward and backward (two under "
        "gradient accumulation), a copy of the weights and of the gradients, and one wait for the "
        "device."
    )
    hookline_group = HookGroup.MONITOR
    hookline_records = True

    def __init__(
        self,
        log_frequency: PositiveInt = 200,
        distance: Annotated[float, Field(gt=0, le=0.1)] = 1e-3,
    ) -> None:
        self.log_frequency = log_frequency
        self.distance = distance
        self._batch: Any = None
        self._batches = 0
        self._random: dict[str, Any] | None = None
        self._found: Tensor | None = None
        self._lr = 0.0

    def on_train_start(self, trainer: Any, optimizers: list[Any]) -> None:
        """Raise if this loop or these parameters are not supported."""
        self._forget()
        if getattr(trainer, "compute_loss_apart", None) is None:
            raise HookConfigError(
                "Sharpness computes the loss of a batch again, which only Hookline's own Trainer "
                f"can do, not {type(trainer).__name__}. Remove the hook, or train with "
                "hookline.Trainer."
            )
        parameters = _parameters_of(optimizers)
        if any(is_sharded(parameter) for parameter in parameters):
            raise HookConfigError(
                "Sharpness: the model's parameters are sharded (FSDP2), which is not supported. "
                "Remove the hook, or train with DDP or in one process."
            )
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters):
            raise HookConfigError(
                "Sharpness: the model has parameters in half precision, which cannot be moved by "
                "small distances. Train with precision='bf16' or 'fp16' and parameters in float32."
            )

    def _forget(self) -> None:
        self._batch = self._random = self._found = None
        self._batches = 0

    def on_train_batch_start(self, trainer: Any, batch: Any, step: int) -> None:
        """Keep the batch and the random states that its forward begins with, if it is due."""
        if (step + 1) % self.log_frequency == 0:
            self._batch, self._random = batch, random_state(trainer.device)
            self._batches += 1

    def on_gradients_ready(self, trainer: Any, optimizer_idx: int, optimizers: list[Any]) -> None:
        """Measure, before the first optimizer steps."""
        if self._batch is None or optimizer_idx or self._found is not None:
            return
        parameters = [p for p in _parameters_of(optimizers) if p.requires_grad]
        parameters = [p for p in parameters if p.grad is not None]
        if parameters:
            self._lr = float(optimizers[0].param_groups[0]["lr"])
            buffers = [b for b in trainer.model.buffers() if b is not None]
            self._found = self._measure(trainer, parameters, buffers)

    def _measure(
        self, trainer: Any, parameters: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Tensor:
        """Return the curvature, and put everything back."""
        now = random_state(trainer.device)
        kept = [buffer.clone() for buffer in buffers]
        weights = [parameter.detach().clone() for parameter in parameters]
        try:
            direction: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
            if self._batches > 1:  # the accumulated gradient is that of other batches, too
                direction = self._gradients(trainer, parameters)
                _restore(buffers, kept)
                _average(direction)
            length = global_norm(direction)
            # On the device: the distance is never read.
            distance = self.distance * global_norm(weights)
            factor = distance / length
            with torch.no_grad():
                for parameter, along in zip(parameters, direction, strict=True):
                    parameter.add_(along.to(parameter.dtype) * factor)
            after = self._gradients(trainer, parameters)
            product = _dot(direction, after)
            if world_size() > 1:
                torch.distributed.all_reduce(product)
                product = product / world_size()
            return (product / length - length.to(product.dtype)) / distance
        finally:
            _restore(parameters, weights)
            _restore(buffers, kept)
            restore_random_state(now, trainer.device)

    def _gradients(self, trainer: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the kept batch, without a change of `.grad`."""
        assert self._random is not None
        restore_random_state(self._random, trainer.device)
        loss = trainer.compute_loss_apart(self._batch)
        scaler = trainer.strategy.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        found = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
        return [
            torch.zeros_like(p) if g is None else g / scale if scale != 1.0 else g
            for p, g in zip(parameters, found, strict=True)
        ]

    def on_step_end(self, trainer: Any) -> None:
        """Log the result."""
        found = self._found
        if self._batch is not None:
            self._forget()
        if found is not None:
            (value,) = read_tensors([found])
            if math.isfinite(value):
                trainer.log("sharpness/along_gradient", value)
                trainer.log("sharpness/times_lr", value * self._lr)


def _parameters_of(optimizers: Sequence[Any]) -> list[Tensor]:
    return [p for one in optimizers for group in one.param_groups for p in group["params"]]


@torch.no_grad()
def _restore(tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.copy_(value)


def _average(gradients: Sequence[Tensor]) -> None:
    """Average gradients over all processes, as DDP has done it with those of the step."""
    if world_size() > 1:
        for gradient in gradients:
            torch.distributed.all_reduce(gradient)
            gradient.div_(world_size())


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    pairs = zip(first, second, strict=True)
    wide = widest_float(first[0].device)
    return torch.stack([(a.to(wide) * b.to(wide)).sum() for a, b in pairs]).sum()
