"""Checkpoints: durable, verified, and readable without running code from the file.

Names are loaded when first used: finding checkpoints does not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.errors import CheckpointError
from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.checkpoint.catalog import (
        FORMAT_VERSION,
        complete_checkpoints,
        find_checkpoint,
        set_pointer,
    )
    from hookline.checkpoint.folder import Checkpoint, load_checkpoint, save_checkpoint
    from hookline.checkpoint.saver import CheckpointSaver, SaveResult

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "CheckpointError",
    "CheckpointSaver",
    "SaveResult",
    "complete_checkpoints",
    "find_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "set_pointer",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "folder": ("Checkpoint", "load_checkpoint", "save_checkpoint"),
        "catalog": ("FORMAT_VERSION", "complete_checkpoints", "find_checkpoint", "set_pointer"),
        "saver": ("CheckpointSaver", "SaveResult"),
    },
)
