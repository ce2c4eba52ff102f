"""One file for a training: read, merged, checked, and made into objects.

    training = hookline.config_files.load_training("train.yaml", "trainer.max_epochs=3")
    training.fit()

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from hookline.config_files.file_model import TrainingConfig
    from hookline.config_files.json_schema import training_schema
    from hookline.config_files.loading import Training, load_training
    from hookline.config_files.problems import FileError, Problem

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
        "loading": ("Training", "load_training"),
        "file_model": ("TrainingConfig",),
        "problems": ("FileError", "Problem"),
        "json_schema": ("training_schema",),
    },
)
