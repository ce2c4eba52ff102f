"""Sharpness: measures the curvature of the loss along the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from hookline.errors import HookConfigError
from hookline.hooks.monitoring.monitor_bases import TrainingMonitor, parameters_of
from hookline.loop.loop import processes_of
from hookline.loop.random_state import (
    generator_state,
    random_state,
    restore_random_state,
    set_generator_state,
)
from hookline.tensors.device_numbers import read_tensors, widest_float
from hookline.tensors.norms import global_norm
from hookline.tensors.sharded import is_sharded, stored_values


class Sharpness(TrainingMonitor):
    """Measures the curvature of the loss along the gradient, gᵀHg / gᵀg.

    A step of gradient descent lowers the loss, to second order, while the learning rate is below 2
    divided by it (see arXiv 2604.14108). It is the difference of two gradients, at the weights and
    at weights that are moved a little along the gradient, divided by the distance, and so works
    with fused attention, too.

    The batch is that of the step, with the same dropout; of several batches, the last one; with
    DDP, all processes' batches together. The state of training stays as it is, and other hooks and
    probes do not see the additional calls of the model; `step_fn` or `loss_fn` is called twice
    more.

    Logged are `sharpness/along_gradient`, and `sharpness/times_lr`, its product with the learning
    rate of the first optimizer. Hookline's own trainer is needed. Sharded (FSDP2) and
    half-precision parameters are refused.

    Args:
        every: measure every N optimizer steps.
        distance: how far the weights are moved, relative to their norm.
    """

    every_name = "log_frequency"
    cost = (
        "Only for a report: two more forwards and backwards, a copy of the weights, and one wait "
        "for the device."
    )

    def __init__(
        self,
        every: PositiveInt = 200,
        distance: Annotated[float, Field(gt=0, le=0.1)] = 1e-3,
    ) -> None:
        self.every = every
        self.distance = distance
        self._step: int | None = None
        self._batch: Any = None
        self._random: _RandomStates | None = None
        self._found: Tensor | None = None
        self._lr = 0.0

    def on_train_start(self, trainer: Any, optimizers: list[Any]) -> None:
        self._forget()
        self._check(trainer, optimizers)

    def _check(self, trainer: Any, optimizers: list[Any]) -> None:
        if getattr(trainer, "compute_loss_apart", None) is None:
            raise HookConfigError(
                "Sharpness computes the loss of a batch again, which only Hookline's own Trainer "
                f"can do, not {type(trainer).__name__}. Remove the hook, or train with "
                "hookline.Trainer."
            )
        parameters = parameters_of(optimizers)
        if any(is_sharded(parameter) for parameter in parameters):
            raise HookConfigError(
                "Sharpness: the parameters are sharded (FSDP2). Remove the hook, or train with DDP."
            )
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters):
            raise HookConfigError(
                "Sharpness: the model has parameters in half precision. Train with "
                "precision='bf16' or 'fp16' and parameters in float32."
            )

    def _forget(self) -> None:
        self._batch = self._random = self._found = None

    def on_train_batch_start(
        self, trainer: Any, batch: Any, step: int, optimizers: list[Any]
    ) -> None:
        if (step + 1) % self.every == 0:
            self._check(trainer, optimizers)  # also of a hook that was added during training
            self._forget()
            self._step, self._batch, self._random = step, batch, _RandomStates(trainer)

    def on_gradients_ready(self, trainer: Any, optimizers: list[Any]) -> None:
        if self._batch is None or self._found is not None:
            return
        parameters = [
            p for p in parameters_of(optimizers) if p.requires_grad and p.grad is not None
        ]
        if parameters:
            self._lr = float(optimizers[0].param_groups[0]["lr"])
            self._found = self._measure(trainer, parameters)

    def _measure(self, trainer: Any, parameters: Sequence[Tensor]) -> Tensor:
        """Return the curvature, and put everything back."""
        random, buffers = _RandomStates(trainer), _Buffers(trainer.model)
        weights = [parameter.detach().clone() for parameter in parameters]
        processes = processes_of(trainer)
        try:
            direction = self._gradients(trainer, parameters)
            buffers.restore()
            _average(direction, processes.size)
            length = global_norm(direction)
            # On the device: the distance is never read.
            distance = self.distance * global_norm([stored_values(weight) for weight in weights])
            factor = distance / length
            with torch.no_grad():
                for parameter, along in zip(parameters, direction, strict=True):
                    moved = stored_values(parameter)
                    moved.add_(along.to(moved.dtype) * factor.to(moved.device))
            after = self._gradients(trainer, parameters)
            product = _dot(direction, after)
            _average([product], processes.size)
            return (product / length - length.to(product.dtype)) / distance
        finally:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.copy_(weight)
            buffers.restore()
            random.restore()

    def _gradients(self, trainer: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the kept batch, dense, without a change of `.grad`."""
        assert self._random is not None
        self._random.restore()
        loss = trainer.compute_loss_apart(self._batch)
        scaler = trainer.strategy.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        found = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
        return [
            _dense(torch.zeros_like(p) if g is None else g / scale if scale != 1.0 else g)
            for p, g in zip(parameters, found, strict=True)
        ]

    def on_step_end(self, trainer: Any, step: int) -> None:
        if self._batch is None:
            return
        found = self._found
        self._forget()
        if found is not None and self._step in (step - 1, step):  # a skipped step does not count
            (value,) = read_tensors([found])
            if math.isfinite(value):
                trainer.log("sharpness/along_gradient", value)
                trainer.log("sharpness/times_lr", value * self._lr)


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient as real numbers, also of zeros that are not stored."""
    return stored_values(gradient.to_dense() if gradient.is_sparse else gradient)


class _RandomStates:
    """The states of the global generators, and of those that the model's modules have."""

    def __init__(self, trainer: Any) -> None:
        self._device = trainer.device
        self._global = random_state(self._device)
        self._own = [
            (value, generator_state(value))
            for module in trainer.model.modules()
            for value in vars(module).values()
            if isinstance(value, torch.Generator)
        ]

    def restore(self) -> None:
        """Set the generators to these states."""
        restore_random_state(self._global, self._device)
        for generator, state in self._own:
            set_generator_state(generator, state)


class _Buffers:
    """The buffers of a model, which a forward may change in place or replace."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the modules the same buffers, with the same values."""
        for module, name, buffer, value in self._kept:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


def _average(tensors: Sequence[Tensor], processes: int) -> None:
    """Average over all processes, in place, as DDP has done it with the step's gradients."""
    if processes > 1:
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
            tensor.div_(processes)


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    home = first[0].device
    wide = widest_float(home)
    products = [(a.to(wide) * b.to(wide)).sum() for a, b in zip(first, second, strict=True)]
    return torch.stack([product.to(home) for product in products]).sum()
