"""CheckpointHook: saves a checkpoint every N epochs."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt

from hookline.checkpoint.retention import Retention
from hookline.hooks.checkpointing.checkpoint_saving import SavingHook

__all__ = ["CheckpointHook"]


class CheckpointHook(SavingHook):
    """Saves a checkpoint at the end of every N-th epoch, as `epoch_0003` in the run's folder.

    Args:
        save_every_n_epochs: the number of epochs between checkpoints.
        keep: the number of newest checkpoints to keep; None: all.
    """

    cost = "The time of a checkpoint at the end of every N-th epoch, and nothing in between."

    def __init__(
        self, save_every_n_epochs: PositiveInt = 1, keep: PositiveInt | None = None
    ) -> None:
        self._every = save_every_n_epochs
        self._retention = Retention(keep=-1 if keep is None else keep, order="newest")

    def on_epoch_end(self, trainer: Any, epoch: int, step: int) -> None:
        """Save every N epochs."""
        if (epoch + 1) % self._every == 0:
            trainer.save_checkpoint(self._retention.reserve(f"epoch_{epoch:04d}", step, None))

    def on_train_end(self) -> None:
        """Release the retention."""
        self._release()
