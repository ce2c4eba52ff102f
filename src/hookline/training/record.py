"""What a trainer writes down: the run folder, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.dispatch import Summary
from hookline.errors import TrainingError
from hookline.runs import Run
from hookline.runs.run import Kind

if TYPE_CHECKING:
    from hookline.trainer import Trainer

__all__ = ["Record"]


class Record:
    """The record of a run; without a folder it does nothing."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self.run: Run | None = None  # None also when the run is over
        self._checkpoints: Path | None = None

    def start(self, trainer: Trainer, restored: Path | None) -> None:
        """Begin a run; a resumed one goes on in its folder where that is still there."""
        if self._root is None or not trainer._strategy.is_main:
            return
        folder = None if restored is None else restored.parent.parent
        if folder is not None and (folder / "manifest.json").is_file():
            self.run = Run.open(folder, resume=True)
        else:
            self.run = Run.create(
                self._root,
                config=trainer.config.model_dump(mode="json"),
                seed=trainer.config.seed,
                hooks=[
                    {
                        "name": info.name,
                        "kind": info.kind,
                        "class": info.cls,
                        "enabled": info.enabled,
                    }
                    for info in trainer.hooks.describe()
                ],
            )
        self._checkpoints = self.run.checkpoints
        self.event(
            "start", step=trainer.step, resumed_from=None if restored is None else str(restored)
        )

    def value(self, step: int, epoch: int, name: str, value: Any, kind: Kind) -> None:
        """Record a value that somebody logged."""
        if self.run is not None:
            self.run.log(step, epoch, name, value, kind)

    def metrics(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of an epoch or a validation."""
        if self.run is not None:
            self.run.log_metrics(step, epoch, metrics)

    def epoch(self, step: int, epoch: int, means: Mapping[str, Any]) -> None:
        """Record the means of an epoch; that of the loss apart from those of its steps."""
        self.metrics(
            step,
            epoch,
            {"train/loss_epoch" if n == "train/loss" else n: value for n, value in means.items()},
        )

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened."""
        if self.run is not None:
            self.run.event(kind, **fields)

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

    def close(
        self, status: str, reason: str | None, summary: Summary, error: BaseException | None
    ) -> None:
        """End the run; what comes after it is not recorded."""
        if self.run is not None:
            self.run.event("end", status=status, reason=reason, hooks=summary.as_dict())
            self.run.close(status, error)
            self.run = None
