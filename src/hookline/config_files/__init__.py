"""Config files: parsed, merged, validated, and built into a trainer with its data.

    training = hookline.config_files.load_training("train.yaml", "trainer.max_epochs=3")
    training.fit()

Names are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.config_files.json_schema import training_schema
    from hookline.config_files.loading import Training, load_training
    from hookline.config_files.sections import TrainingConfig
    from hookline.config_files.tree import FileError, Problem

__all__ = [
    "FileError",
    "Problem",
    "Training",
    "TrainingConfig",
    "load_training",
    "training_schema",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "tree": ("FileError", "Problem"),
        "sections": ("TrainingConfig",),
        "json_schema": ("training_schema",),
        "loading": ("Training", "load_training"),
    },
)
