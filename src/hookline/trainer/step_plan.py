"""What every batch of a trainer's run needs of its configuration, read once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hookline.config.trainer_config import TrainerConfig
from hookline.trainer.checks import needs_metric
from hookline.trainer.losses import LossCheck
from hookline.trainer.strategies import SingleProcess

__all__ = ["StepPlan"]


@dataclass
class StepPlan:
    """Settings of a run as plain attributes: those of the configuration are slow to read.

    Attributes:
        accumulate: the batches in a step.
        limit: the steps of the run; infinite if only its epochs are limited.
        validate_every: the steps between two validations; None if only epochs are validated.
        optimizer_every: for each optimizer, in how many steps it steps once.
        has_optimizer_schedule: whether one of them does not step in every step.
        due: the optimizers that step in this step, with their numbers.
        schedulers: those that step after each optimizer, by optimizer; empty if none does.
        autocasts: whether forward and loss are computed in another precision.
        clips: whether gradients are clipped.
        clip_norm: the largest norm of gradients; None without a limit.
        clip_value: the largest element of gradients; None without a limit.
        reads_at_once: whether there is no device to wait for.
        loss_check: finds losses that are not finite.
        multi_loader: whether there are several loaders.
    """

    accumulate: int
    limit: float
    validate_every: int | None
    optimizer_every: list[int]
    has_optimizer_schedule: bool
    due: list[tuple[int, torch.optim.Optimizer]]
    schedulers: list[list[Any]]
    autocasts: bool
    clips: bool
    clip_norm: float | None
    clip_value: float | None
    reads_at_once: bool
    loss_check: LossCheck
    multi_loader: bool

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        strategy: SingleProcess,
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        *,
        multi_loader: bool,
    ) -> StepPlan:
        """Return the plan of a run with this configuration."""
        every = config.optimizer_every or [1] * len(optimizers)
        by_optimizer: list[list[Any]] = []
        if schedulers and config.scheduler_every == "step":
            by_optimizer = [
                [
                    strategy.stepped_scheduler(scheduler)
                    for scheduler in schedulers
                    if scheduler.optimizer is optimizer and not needs_metric(scheduler)
                ]
                for optimizer in optimizers
            ]
        reads_at_once = strategy.device.type == "cpu"
        return cls(
            accumulate=config.accumulate,
            limit=math.inf if config.max_steps is None else config.max_steps,
            validate_every=config.validate_every_steps,
            optimizer_every=every,
            has_optimizer_schedule=any(n > 1 for n in every),
            due=list(enumerate(optimizers)),
            schedulers=by_optimizer,
            autocasts=config.precision != "fp32",
            clips=config.clip_norm is not None or config.clip_value is not None,
            clip_norm=config.clip_norm,
            clip_value=config.clip_value,
            reads_at_once=reads_at_once,
            loss_check=LossCheck(config.on_nan, deferred=not reads_at_once),
            multi_loader=multi_loader,
        )
