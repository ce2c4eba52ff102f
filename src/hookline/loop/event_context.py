"""The event context: the arguments of events, as attributes.

A loop writes its context, dispatchers read it. Expensive values (a norm, the state mapping, the
context of a step) are made when a hook asks for them.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from hookline.context import LazyFloat
from hookline.dispatch import HookManager
from hookline.loop.norm_agreement import NormAgreement
from hookline.loop.processes import OneProcess
from hookline.tensors.global_norm import global_norm
from hookline.tensors.sharded import needs_collective
from hookline.updates.gradients import Gradients, NamedParameters

__all__ = ["EventContext", "device_of", "gradients_of"]


class EventContext:
    """What the event contexts of all loops have in common."""

    def __init__(
        self, trainer: Any, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self.trainer = trainer
        self.connect(model, optimizers)
        self.status = "training"
        self.step = 0
        self.step_in_progress = 1
        self.optimizer_idx = 0
        self.outputs: Any = None
        self.reason = ""
        self.exception: BaseException | None = None
        self.checkpoint_path: Any = None
        self.skipped = False
        self.evaluating = False
        self.shows_generation = False  # the model generates, and probes see it
        self.made_gradients: Gradients | None = None
        self.observation: Any = None
        self.clipped_norm: torch.Tensor | None = None
        self.norm_agreement: NormAgreement | None = None  # where gradients are sharded
        self.agreed_norm: torch.Tensor | None = None

    def connect(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Set what is trained; a host makes its optimizers when training starts."""
        self.model = model
        self.optimizers = optimizers
        if optimizers:
            self.optimizer = optimizers[0]
            self.named = NamedParameters(model, optimizers)

    @property
    def gradients(self) -> Gradients:
        """The gradients of the optimizer that steps, as updates get them."""
        if self.made_gradients is None:
            self.made_gradients = Gradients(self.named[self.optimizer_idx])
        return self.made_gradients

    @property
    def activations(self) -> Any:
        """The model's outputs, as forward hooks get them."""
        return self.observation.activations

    @property
    def lr(self) -> Any:
        """The first optimizer's learning rate."""
        lr = self.optimizer.param_groups[0]["lr"]
        # A copy, because schedulers change the tensor in place.
        return LazyFloat(lr.detach().clone()) if isinstance(lr, torch.Tensor) else lr

    @property
    def grad_norm(self) -> LazyFloat:
        """The norm of all gradients, before clipping if the loop's clipping is known."""
        return LazyFloat(self.norm())

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients, on the device."""
        if self.clipped_norm is not None:
            return self.clipped_norm
        if self.norm_agreement is None:
            return self.compute_norm()
        if self.agreed_norm is None:  # reading a value must not start a collective
            self.norm_agreement.warn_of_late_hook()
            return torch.tensor(math.nan)
        return self.agreed_norm

    def compute_norm(self) -> torch.Tensor:
        """Compute the norm of all gradients. If they are sharded, all ranks have to call this."""
        return global_norm(self.all_gradients())

    def agree_on_norm(self, hooks: HookManager, processes: OneProcess) -> None:
        """Agree with all ranks, between two steps, on when the norm is computed.

        Without sharded parameters nothing has to be agreed on, and this is not a collective.
        """
        self.norm_agreement = None
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        if any(needs_collective(parameter) for group in groups for parameter in group["params"]):
            self.norm_agreement = NormAgreement(hooks, processes)

    def prepare_norm(self, epoch: int | None) -> None:
        """Compute the norm of sharded gradients, if a hook of any rank asks for it in this step."""
        agreement = self.norm_agreement
        if agreement is not None and agreement.is_due(self.step_in_progress, epoch):
            known = self.clipped_norm
            self.agreed_norm = self.compute_norm() if known is None else known

    def all_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all optimizers' parameters."""
        return [gradient for optimizer in self.optimizers for gradient in gradients_of(optimizer)]

    @cached_property
    def model_params(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of an optimizer's parameters."""
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
