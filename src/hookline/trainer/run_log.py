"""What a trainer writes down: the run folder, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookline.errors import TrainingError
from hookline.runs.recorder import Recorder

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["RunLog"]


class RunLog(Recorder):
    """The record of a trainer's run; without a folder it only logs what starts."""

    def __init__(self, root: Path | None) -> None:
        super().__init__(root)
        self._checkpoints: Path | None = None

    def start(self, trainer: Trainer, restored: Path | None) -> None:
        """Begin a run; a resumed one goes on in its folder where that is still there."""
        if not trainer.strategy.is_main:
            return
        folder = None if restored is None else restored.parent.parent
        there = folder is not None and (folder / "manifest.json").is_file()
        self.begin(
            config=trainer.config.model_dump(mode="json"),
            seed=trainer.config.seed,
            hooks=trainer.hooks.describe(),
            device=trainer.device,
            step=trainer.step,
            goes_on=folder if there and trainer.config.runs is not None else None,
            restored=restored,
        )
        if self.run is not None:
            self._checkpoints = self.run.checkpoints

    def checkpoint_folder(self, path: Path | str | None, step: int) -> Path:
        """Where a checkpoint goes."""
        if path is not None:
            return Path(path)
        if self._checkpoints is None:
            raise TrainingError(
                "There is no run folder to save into. Give a path: save_checkpoint('…'), or set "
                "`runs` in the configuration."
            )
        return self._checkpoints / f"step_{step:06d}"
