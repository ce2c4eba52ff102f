"""The trainer: its loop, data streams, losses, progress display and strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.trainer.factory import AccelerateTrainer, get_trainer
    from hookline.trainer.trainer import Trainer

__all__ = ["AccelerateTrainer", "Trainer", "get_trainer"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "trainer": ("Trainer",),
        "factory": ("AccelerateTrainer", "get_trainer"),
    },
)
