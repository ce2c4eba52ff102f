"""One file for a training: read, merged, checked, and made into objects.

    training = hookline.files.load_training("train.yaml", "trainer.max_epochs=3")
    training.fit()

Names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_WHERE = {
    "FileError": "hookline.files.problems",
    "Problem": "hookline.files.problems",
    "Training": "hookline.files.loading",
    "TrainingConfig": "hookline.files.model",
    "load_training": "hookline.files.loading",
    "training_schema": "hookline.files.schema",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hookline.files' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
