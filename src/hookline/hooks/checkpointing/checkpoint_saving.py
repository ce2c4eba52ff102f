"""The base of hooks that save checkpoints: the folder, and which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.retention import Retention
from hookline.errors import TrainingError
from hookline.hook import Rank
from hookline.options import BuiltIn

__all__ = ["SavingHook"]


class SavingHook(BuiltIn):
    """Saves through the trainer; a `Retention` decides which checkpoints are kept.

    A save that is requested in an event happens at the next step boundary. The retention is
    updated in `on_checkpoint_save`, when the checkpoint is durable.
    """

    critical = True
    hookline_rank = Rank.CHECKPOINT

    _retention: Retention
    _folder: Path | None = None
    _resumed = False

    def on_train_start(self, trainer: Any) -> None:
        """Find the folder; a run that is not resumed starts without checkpoints."""
        self._retention.open(self._find_folder(trainer), resumed=self._resumed)

    def on_checkpoint_load(self, checkpoint_path: Any) -> None:
        """Compare the saved list of checkpoints with those that still exist."""
        if self._resumed:
            self._retention.reconcile(Path(checkpoint_path))

    def on_checkpoint_save(self, checkpoint_path: Any) -> None:
        """Rank the checkpoint if this hook requested it, and remove those that are not kept."""
        self._retention.mark_saved(Path(checkpoint_path))

    def _release(self) -> None:
        """Release the retention at the end of training."""
        self._retention.release()
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints of this hook with their scores."""
        return {"checkpoints": self._retention.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the list of checkpoints."""
        self._retention.load_state_dict(state["checkpoints"])
        self._resumed = True

    @property
    def last_model_path(self) -> Path | None:
        """The newest checkpoint of this hook."""
        return self._retention.path_of(self._retention.newest)

    def _find_folder(self, trainer: Any) -> Path:
        hook = type(self).__name__
        if not hasattr(trainer, "save_checkpoint"):
            raise TrainingError(
                f"{hook} saves through a Trainer, which this loop does not have. Save in the loop, "
                "and call session.checkpoint(path) afterwards."
            )
        if self._folder is not None:
            return self._folder
        if trainer.run is None:
            raise TrainingError(
                f"{hook} saves into the run's folder, but this training run has none. Set `runs` "
                "in the configuration, or pass a folder to the hook."
            )
        return Path(trainer.run.checkpoints)
