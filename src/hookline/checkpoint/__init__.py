"""Checkpoints: durable, verified, readable without running any code from the file."""

from __future__ import annotations

from hookline.checkpoint.checkpoint_folder import (
    FORMAT_VERSION,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from hookline.checkpoint.find_checkpoint import find_checkpoint, point
from hookline.errors import CheckpointError

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "CheckpointError",
    "find_checkpoint",
    "load_checkpoint",
    "point",
    "save_checkpoint",
]
