"""What events carry in the trainer's loop."""

from __future__ import annotations

from typing import Any

import torch

from hookline.context import LazyFloat, Metrics, State, StepContext
from hookline.loop.event_context import EventContext, device_of
from hookline.loop.means import Means

__all__ = ["TrainerEventContext"]


class TrainerEventContext(EventContext):
    """The arguments of events; the trainer writes them as it goes."""

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        config: Any,
    ) -> None:
        super().__init__(trainer, model, optimizers)
        self.config = config
        self.run: Any = None
        self.epoch = 0
        self.tokens_seen = 0
        self.batch: Any = None
        self.batch_idx = 0
        self.dataloader_idx = 0
        self.dataloader_name = ""
        self.loss: Any = None
        self.latest_loss: Any = None
        self.extra: dict[str, Any] = {}
        self.used_lr: Any = None
        self.means = Means()
        self.made_metrics: Metrics | None = None

    @property
    def metrics(self) -> Metrics:
        """The metrics of the event; of a batch they are made when somebody asks."""
        if self.made_metrics is None:
            self.made_metrics = Metrics({"loss": self.loss, **self.extra})
        return self.made_metrics

    @property
    def lr(self) -> Any:
        """The rate that this step used; schedulers have stepped since."""
        return super().lr if self.used_lr is None else self.used_lr

    def keep_lr(self) -> None:
        """Note the rate that this step uses."""
        self.used_lr = super().lr

    @property
    def ctx(self) -> StepContext:
        """The step."""
        return StepContext(
            step=self.step,
            loss=self.loss,
            grad_norm=self.norm_of_this_step(),
            lr=self.lr,
            tokens_seen=self.tokens_seen,
            model=self.model,
            optimizer=self.optimizer,
            skipped=self.skipped,
        )

    @property
    def state(self) -> State:
        """Where training stands, as small trainers tell it."""
        latest = self.latest_loss
        return State(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "device": device_of(self.model),
                "current_epoch": self.epoch,
                "current_batch_idx": self.batch_idx,
                "latest_loss": None if latest is None else LazyFloat(latest),
                "avg_loss": self.means.mean("train/loss"),
                "model_params": self.model_params,
                "status": self.status,
            }
        )
