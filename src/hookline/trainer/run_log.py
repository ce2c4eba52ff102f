"""The run that a trainer writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookline.errors import TrainingError
from hookline.runs.recorder import Recorder
from hookline.runs.run_lookup import find_run_of_checkpoint

if TYPE_CHECKING:
    from hookline.trainer.trainer_base import TrainerBase

__all__ = ["RunLog"]


class RunLog(Recorder):
    """Writes a trainer's run; without a folder, the start of the run is only logged."""

    def __init__(self, root: Path | None) -> None:
        super().__init__(root)
        self._checkpoints: Path | None = None

    def start(self, trainer: TrainerBase, restored: Path | None) -> None:
        """Start a run, or continue the folder of a resumed one if it still exists."""
        if not trainer.strategy.is_main:
            return
        folder = None if restored is None else find_run_of_checkpoint(restored)
        self.begin(
            config=trainer.config.model_dump(mode="json"),
            seed=trainer.config.seed,
            hooks=trainer.hooks.describe(),
            device=trainer.device,
            step=trainer.step,
            resumed_run=folder if trainer.config.runs is not None else None,
            restored=restored,
        )
        if self.run is not None:
            self._checkpoints = self.run.checkpoints

    def checkpoint_folder(self, path: Path | str | None, step: int) -> Path:
        """Return the folder for a checkpoint."""
        if path is not None:
            return Path(path)
        if self._checkpoints is None:
            raise TrainingError(
                "There is no run folder to save into. Give a path: save_checkpoint('…'), or set "
                "`runs` in the configuration."
            )
        return self._checkpoints / f"step_{step:06d}"
