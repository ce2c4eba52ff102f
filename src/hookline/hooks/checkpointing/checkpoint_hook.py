"""CheckpointHook: saves a checkpoint at the end of every N-th epoch."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt

from hookline.checkpoint.retention import Retention
from hookline.hooks.checkpointing.model_checkpoint import SavingHook


class CheckpointHook(SavingHook):
    """Saves a checkpoint at the end of every N-th epoch, as `epoch_0003` in the run's folder.

    Args:
        every: the number of epochs between checkpoints.
        keep: the number of newest checkpoints to keep; None: all.
    """

    every_name = "save_every_n_epochs"
    cost = "The time of a checkpoint at the end of every N-th epoch, and nothing in between."

    def __init__(
        self,
        every: PositiveInt = 1,
        keep: PositiveInt | None = None,
    ) -> None:
        self.every = every
        self._retention = Retention(keep_last=-1 if keep is None else keep)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int) -> None:
        if (epoch + 1) % self.every == 0:
            self._open(trainer)
            trainer.save_checkpoint(self._retention.reserve(f"epoch_{epoch:04d}", step, None))

    def on_train_end(self) -> None:
        self._release()
