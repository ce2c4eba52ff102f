"""The trainer: its loop, data streams, losses, progress display and strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer, get_trainer

__all__ = ["Trainer", "get_trainer"]

__getattr__ = lazy_getattr(__name__, {"trainer": ("Trainer", "get_trainer")})
