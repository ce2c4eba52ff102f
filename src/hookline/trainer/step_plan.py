"""The settings that every batch of a trainer's run needs, read once."""

from __future__ import annotations

import math
from typing import Any

import torch

from hookline.config.trainer_config import TrainerConfig
from hookline.trainer.checks import needs_metric
from hookline.trainer.losses import LossCheck
from hookline.trainer.strategies import SingleProcess

__all__ = ["StepPlan"]


class StepPlan:
    """Settings of a run as plain attributes: those of the configuration are slow to read."""

    def __init__(
        self,
        config: TrainerConfig,
        strategy: SingleProcess,
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        *,
        multi_loader: bool,
    ) -> None:
        self.accumulate = config.accumulate  # batches in a step
        self.limit = math.inf if config.max_steps is None else config.max_steps
        self.validate_every = config.validate_every_steps
        self.optimizer_every = config.optimizer_every or [1] * len(optimizers)
        self.has_optimizer_schedule = any(n > 1 for n in self.optimizer_every)
        self.due = list(enumerate(optimizers))  # those that step in this step, by number
        self.schedulers: list[list[Any]] = []  # of each optimizer, stepped after it
        if schedulers and config.scheduler_every == "step":
            self.schedulers = [
                [
                    strategy.stepped_scheduler(scheduler)
                    for scheduler in schedulers
                    if scheduler.optimizer is optimizer and not needs_metric(scheduler)
                ]
                for optimizer in optimizers
            ]
        self.autocasts = config.precision != "fp32"
        self.clip_norm, self.clip_value = config.clip_norm, config.clip_value
        self.clips = config.clip_norm is not None or config.clip_value is not None
        self.reads_at_once = strategy.device.type == "cpu"  # there is no device to wait for
        self.loss_check = LossCheck(config.on_nan, deferred=not self.reads_at_once)
        self.multi_loader = multi_loader
