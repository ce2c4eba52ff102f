"""ModelCheckpoint: keeps the best checkpoints by a metric, and the last one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from hookline.checkpoint.retention import Retention
from hookline.context import LazyFloat, Metrics
from hookline.errors import ConfigError
from hookline.hooks.checkpointing.checkpoint_saving import SavingHook
from hookline.hooks.checkpointing.filename import Filename
from hookline.hooks.metric_lookup import RequiresMetrics, metric_value

__all__ = ["ModelCheckpoint"]

log = logging.getLogger("hookline")


class ModelCheckpoint(SavingHook, RequiresMetrics):
    """Saves checkpoints, ranks them by a metric, and keeps the best and the last.

    It saves after validation, at the end of epochs or every N steps, and only checkpoints that
    would be kept. The file `best` in the folder contains the name of the best one. It removes only
    checkpoints that it has written itself, never those that `best` or `last` name, and only after
    the next checkpoint is durable. Of two equal scores the earlier is better. NaN and infinities
    rank last, and are never the best.

    Without validation data it saves at the end of epochs.

    Args:
        save_top_k: the number of best checkpoints to keep; 0: none, -1: all.
        monitor: the metric to rank by, such as `val/loss`; None: the newest is the best.
        mode: whether lower (`min`) or higher (`max`) is better.
        save_last: save every time and at the end of training, and also keep the newest checkpoint,
            whatever its rank.
        save_on_train_epoch_end: save at the end of epochs instead of after validation.
        every_n_steps: save every N steps instead, ranked by the latest value of the metric.
        every_n_epochs: save only in every N-th epoch.
        filename: the checkpoint's name, with `epoch`, `step` and metrics in braces.
        auto_insert_metric_name: write `{epoch}` as `epoch=3`; False: as `3`.
        folder: where to save; None: in the run's `checkpoints` folder.
    """

    cost = (
        "The time of a checkpoint when it saves; nothing between saves, or one comparison per step "
        "with every_n_steps."
    )

    def __init__(
        self,
        save_top_k: Annotated[int, Field(ge=-1)] = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_last: bool = False,
        save_on_train_epoch_end: bool = False,
        every_n_steps: PositiveInt | None = None,
        every_n_epochs: PositiveInt | None = None,
        filename: str = "{epoch}-{step}",
        auto_insert_metric_name: bool = True,
        folder: str | Path | None = None,
    ) -> None:
        if every_n_steps is not None and (every_n_epochs is not None or save_on_train_epoch_end):
            other = "every_n_epochs" if every_n_epochs is not None else "save_on_train_epoch_end"
            raise ConfigError(
                f"ModelCheckpoint: every_n_steps and {other} both determine when to save. Pass one "
                "of them, or add two hooks."
            )
        self._monitor, self._mode = monitor, mode
        self._at_epoch_end = save_on_train_epoch_end
        self._every_steps, self._every_epochs = every_n_steps, every_n_epochs or 1
        self._filename = Filename(filename, insert_names=auto_insert_metric_name)
        self._folder = None if folder is None else Path(folder)
        self._save_last = save_last
        self._retention = Retention(
            keep=save_top_k,
            order="newest" if monitor is None else mode,
            keep_newest=save_last,
        )
        self._latest_metrics = Metrics()
        self._saved_step = self._measured_step = -1
        self._epochs_ended = 0
        self._is_training = False
        if every_n_steps is None:
            self.on_step_end = None  # type: ignore[method-assign, assignment] # unused

    @property
    def best_model_path(self) -> Path | None:
        """The best checkpoint; None without `monitor`, or if no score was finite."""
        return self._retention.path_of(self._retention.best)

    @property
    def best_model_score(self) -> float | None:
        """The score of the best checkpoint."""
        best = self._retention.best
        return None if best is None else best.score

    # -- when to save -----------------------------------------------------------------------------

    def on_train_start(self, trainer: Any) -> None:
        """Find the folder; a run that is not resumed starts without checkpoints."""
        super().on_train_start(trainer)
        if not self._resumed:
            self._latest_metrics, self._epochs_ended = Metrics(), 0
            self._saved_step = self._measured_step = -1

    def on_epoch_start(self) -> None:
        """Enable saving: a validation before training is not saved."""
        self._is_training = True

    def on_step_end(self, trainer: Any, step: int, epoch: int, loss: LazyFloat) -> None:
        """Save every N steps; skipped steps are not counted."""
        if self._every_steps is None or step % self._every_steps or step == self._saved_step:
            return
        self._saved_step = step
        self._latest_metrics["train/loss"] = loss
        self._save(trainer, epoch, step, self._latest_metrics)

    def on_validation_end(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        """Save after validation, or update the score of the step's checkpoint."""
        if not self._is_training:
            return
        self._keep_metrics(metrics)
        self._measured_step = step
        if self._every_steps is not None:
            if step == self._saved_step:  # the same weights, whose score is known only now
                self._retention.rescore(step, self._score(self._latest_metrics))
        elif not self._at_epoch_end and step != self._saved_step:
            self._save_in_epoch(trainer, epoch, step, metrics)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        """Save at the end of an epoch."""
        self._epochs_ended += 1
        self._keep_metrics(metrics)
        if not _validates(trainer):
            self._measured_step = step
        if self._every_steps is None and self._saves_at_epoch_end(trainer):
            self._save_in_epoch(trainer, epoch, step, metrics)

    def on_train_end(self, trainer: Any, epoch: int, step: int, status: str) -> None:
        """Save the last state, unless training was interrupted in the middle of a step."""
        if (
            self._save_last
            and status in ("completed", "stopped")
            and step > max(0, self._saved_step)
        ):
            self._saved_step = step
            self._is_training = False
            # Weights that were not validated have no score, and rank last.
            self._save(
                trainer, epoch, step, self._latest_metrics if step == self._measured_step else {}
            )
        self._is_training = False
        self._release()

    def required_metrics(self, trainer: Any) -> tuple[str, list[str]]:
        """Return the event in which it saves, and the metrics for ranks and names."""
        late = self._every_steps is not None or self._saves_at_epoch_end(trainer)
        names = [*([] if self._monitor is None else [self._monitor]), *self._filename.metrics]
        return "on_epoch_end" if late else "on_validation_end", names

    def _saves_at_epoch_end(self, trainer: Any) -> bool:
        return self._at_epoch_end or not _validates(trainer)

    # -- saving -----------------------------------------------------------------------------------

    def _save_in_epoch(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        if (epoch + 1) % self._every_epochs == 0:
            self._saved_step = step
            self._save(trainer, epoch, step, metrics)

    def _save(self, trainer: Any, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        score = self._score(metrics)
        if score is not None and not math.isfinite(score) and self._monitor in metrics:
            log.warning(
                "'%s' is %s at step %d, so this checkpoint ranks last.", self._monitor, score, step
            )
        if self._retention.would_keep(score):
            name = self._filename.render(epoch, step, lambda field: self._value(metrics, field))
            trainer.save_checkpoint(self._retention.reserve(name, step, score))

    def _score(self, metrics: Mapping[str, Any]) -> float | None:
        return None if self._monitor is None else self._value(metrics, self._monitor)

    def _value(self, metrics: Mapping[str, Any], name: str) -> float:
        """Return a metric; NaN if it may still be logged, or if training ended before that."""
        early = self._every_steps is not None and not self._epochs_ended
        if name not in metrics and (early or not self._is_training):
            return math.nan
        return metric_value(metrics, name, type(self).__name__)

    def _keep_metrics(self, metrics: Any) -> None:
        for name, value in dict.items(metrics):  # without reading values from the device
            self._latest_metrics[name] = value

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints of this hook with their scores, and the latest metrics."""
        return super().state_dict() | {
            "monitor": self._monitor,
            "mode": self._mode,
            "latest": {n: v for n, v in self._latest_metrics.items() if isinstance(v, int | float)},
            "saved_at": self._saved_step,
            "epochs_seen": self._epochs_ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; checkpoints that were ranked by another metric are not managed."""
        before = state["monitor"], None if state["monitor"] is None else state["mode"]
        now = self._monitor, None if self._monitor is None else self._mode
        if before == now:
            super().load_state_dict(state)
        else:
            log.warning(
                "ModelCheckpoint ranked by %s before and ranks by %s now: it does not rank or "
                "remove the earlier checkpoints.",
                before,
                now,
            )
        self._latest_metrics = Metrics(state["latest"])
        self._saved_step, self._epochs_ended = int(state["saved_at"]), int(state["epochs_seen"])


def _validates(trainer: Any) -> bool:
    """Return whether the trainer validates."""
    config = trainer.config
    when = config.validate_every_epochs, config.validate_every_steps
    return trainer.validates and when != (None, None)
