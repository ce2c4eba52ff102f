"""A training, from its file to its first batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hookline.config_files.file_model import TrainingConfig
from hookline.config_files.merging import Merged, merge_files
from hookline.config_files.trust import Trust, importable
from hookline.config_files.validation import validated

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["Training", "load_training", "read_training"]


@dataclass
class Training:
    """A trainer with its data, and where it comes from.

    Attributes:
        trainer: the trainer.
        source: the file, or the Python function.
        folder: the project's folder, whose modules it may import.
        loaders: what to train on, where the trainer does not have it yet.
        val_loaders: what to validate on, likewise.
    """

    trainer: Trainer
    source: str
    folder: Path
    loaders: Any = None
    val_loaders: Any = None
    overrides: tuple[str, ...] = field(default=())

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as the run's manifest will have it."""
        from hookline.runs.masking import masked

        return cast("dict[str, Any]", masked(self.trainer.config.model_dump(mode="json")))

    @property
    def config_hash(self) -> str:
        """The hash of the resolved configuration, as the run's manifest will have it."""
        from hookline.runs.config_hash import config_hash

        return config_hash(self.config)

    def fit(self, resume_from: Any = None) -> Trainer:
        """Train."""
        with importable(self.folder):  # what it imports while it trains is found, too
            return self.trainer.fit(self.loaders, self.val_loaders, resume_from=resume_from)


def read_training(path: str | Path, overrides: Iterable[str] = ()) -> tuple[TrainingConfig, Merged]:
    """Return what a file says, checked by the models; nothing is imported or made.

    Raises:
        FileError: names all that is wrong.
    """
    merged = merge_files(Path(path), overrides)
    return validated(merged), merged


def load_training(path: str | Path, *overrides: str) -> Training:
    """Return the training of a file, ready to begin.

    Args:
        path: a YAML, TOML or JSON file.
        overrides: `key=value`, such as `trainer.max_epochs=3`; the value is written as YAML.

    Raises:
        FileError: names all that is wrong, with file, line and key.
    """
    from hookline.config_files.building import build_trainer
    from hookline.config_files.checking import check_objects

    path = Path(path)
    config, merged = read_training(path, overrides)
    folder = path.resolve().parent
    with importable(folder):
        resolved = check_objects(config, merged, Trust(folder, config.trust))
        trainer = build_trainer(config, merged, resolved)
    return Training(trainer, str(path), folder)
