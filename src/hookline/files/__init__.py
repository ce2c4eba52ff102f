"""One file for a training: read, merged, checked, and made into objects.

    training = hookline.files.load_training("train.yaml", "trainer.max_epochs=3")
    training.fit()

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.lazy import lazily

if TYPE_CHECKING:
    from hookline.files.loading import Training, load_training
    from hookline.files.model import TrainingConfig
    from hookline.files.problems import FileError, Problem
    from hookline.files.schema import training_schema

__all__ = [
    "FileError",
    "Problem",
    "Training",
    "TrainingConfig",
    "load_training",
    "training_schema",
]

__getattr__ = lazily(
    __name__,
    {
        "loading": ("Training", "load_training"),
        "model": ("TrainingConfig",),
        "problems": ("FileError", "Problem"),
        "schema": ("training_schema",),
    },
)
