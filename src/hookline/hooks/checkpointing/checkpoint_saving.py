"""What hooks that save checkpoints have in common: where they save, and what they keep."""

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
    """Saves through the trainer, and lets a `Retention` decide what stays.

    A save that is asked for within an event is done at the next boundary of the loop; the
    retention hears of it in `on_checkpoint_save`, when it is durable.
    """

    critical = True
    hookline_rank = Rank.CHECKPOINT

    _retention: Retention
    _folder: Path | None = None
    _resumed = False

    def on_train_start(self, trainer: Any) -> None:
        """Find the folder; a run that is not resumed begins with no checkpoints."""
        self._retention.open(self._where(trainer), resumed=self._resumed)

    def on_checkpoint_load(self, checkpoint_path: Any) -> None:
        """Compare what was known with what is still there."""
        if self._resumed:
            self._retention.resumed(Path(checkpoint_path))

    def on_checkpoint_save(self, checkpoint_path: Any) -> None:
        """A checkpoint is durable: rank it and remove what is not kept, if it is one of ours."""
        self._retention.saved(Path(checkpoint_path))

    def _release(self) -> None:
        """Nothing is saved any more."""
        self._retention.release()
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that are known, with their scores."""
        return {"checkpoints": self._retention.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._retention.load_state_dict(state["checkpoints"])
        self._resumed = True

    @property
    def last_model_path(self) -> Path | None:
        """The newest checkpoint of this hook."""
        return self._retention.path(self._retention.newest)

    def _where(self, trainer: Any) -> Path:
        who = type(self).__name__
        if not hasattr(trainer, "save_checkpoint"):
            raise TrainingError(
                f"{who} saves through a Trainer, and this loop has none. Save in the loop, and say "
                "so with session.checkpoint(path)."
            )
        if self._folder is not None:
            return self._folder
        if trainer.run is None:
            raise TrainingError(
                f"{who} saves into the run's folder, and this training has none. Set `runs` in the "
                "configuration, or give the hook a folder."
            )
        return Path(trainer.run.checkpoints)
