"""The event context of the trainer's loop."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hookline.context import LazyFloat, Metrics, State, StepContext
from hookline.loop.event_context import EventContext, device_of
from hookline.loop.means import Means
from hookline.tensors.nested import describe_structure

__all__ = ["TrainerEventContext"]

log = logging.getLogger("hookline")


class TrainerEventContext(EventContext):
    """The arguments of events, written by the trainer."""

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        super().__init__(trainer, model, optimizers)
        self.run: Any = None
        self.epoch = 0
        self.counted_tokens = 0
        self.tokens_unknown = False  # whether a batch's tokens could not be counted
        self._warned_of_tokens = False
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
    def tokens_seen(self) -> int:
        """The number of tokens trained on; where it is not known, 0 and one warning."""
        if self.tokens_unknown and not self._warned_of_tokens:
            self._warned_of_tokens = True
            log.warning(
                "A hook reads tokens_seen, which is not known for %s. Give Trainer(tokens_fn="
                "lambda batch: …), which returns the tokens of a batch. Hooks get %d.",
                describe_structure(self.batch),
                self.counted_tokens,
            )
        return self.counted_tokens

    @property
    def config(self) -> Any:
        """The trainer's configuration."""
        return self.trainer.config

    @property
    def metrics(self) -> Metrics:
        """The metrics of the event; those of a batch are made when they are read."""
        if self.made_metrics is None:
            self.made_metrics = Metrics({"loss": self.loss, **self.extra})
        return self.made_metrics

    @property
    def lr(self) -> Any:
        """The learning rate that this step used, before schedulers stepped."""
        return super().lr if self.used_lr is None else self.used_lr

    def keep_lr(self) -> None:
        """Keep the learning rate that this step uses."""
        self.used_lr = super().lr

    @property
    def ctx(self) -> StepContext:
        """The step, as one object."""
        return StepContext(
            step=self.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            lr=self.lr,
            tokens_seen=self.tokens_seen,
            model=self.model,
            optimizer=self.optimizer,
            skipped=self.skipped,
        )

    @property
    def state(self) -> State:
        """The state mapping: model, epoch, losses, status."""
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
