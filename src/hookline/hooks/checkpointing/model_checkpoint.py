"""ModelCheckpoint: keeps the best checkpoints by a metric, and the last."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from hookline.checkpoint.retention import Retention
from hookline.context import Metrics
from hookline.errors import ConfigError
from hookline.hooks.checkpointing.checkpoint_saving import SavingHook
from hookline.hooks.checkpointing.filename import Filename
from hookline.hooks.metric_lookup import Monitors, monitored

__all__ = ["ModelCheckpoint"]

log = logging.getLogger("hookline")


class ModelCheckpoint(SavingHook, Monitors):
    """Saves checkpoints, ranks them by a metric, and keeps the best and the last.

    It saves after validation, at the end of epochs or every N steps, and only what would be kept.
    `best` in the folder names the best one. It removes nothing that it did not write, nothing that
    `best` or `last` names, and nothing before the next checkpoint is durable. Equal scores: the
    earlier one is the better. NaN and infinities rank last, and are never the best.

    Without validation data it saves at the end of epochs.

    Args:
        save_top_k: how many are kept, the best of them; 0 for none, -1 for all.
        monitor: the metric to rank by, such as `val/loss`; None: the newest is the best.
        mode: whether lower or higher is better.
        save_last: save every time and at the end of training, and keep the newest too, whatever its
            rank.
        save_on_train_epoch_end: save at the end of epochs; else after validation.
        every_n_steps: save every N steps instead, ranked by the latest value of the metric.
        every_n_epochs: save in every N-th epoch only.
        filename: the checkpoint's name; `epoch`, `step` and metrics in braces.
        auto_insert_metric_name: `{epoch}` becomes `epoch=3`; else `3`.
        folder: where to save; None: among the run's checkpoints.
    """

    cost = (
        "The time of a checkpoint when it saves; between saves nothing, or one comparison per step "
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
                f"ModelCheckpoint: every_n_steps and {other} say when to save. Give one of them, "
                "or add two hooks."
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
        self._latest = Metrics()
        self._saved_at = self._measured_at = -1
        self._epochs_seen = 0
        self._trains = False
        if every_n_steps is None:
            self.on_step_end = None  # type: ignore[method-assign, assignment] # costs nothing then

    @property
    def best_model_path(self) -> Path | None:
        """The best checkpoint; None without `monitor`, or when no score was a finite number."""
        return self._retention.path_of(self._retention.best)

    @property
    def best_model_score(self) -> float | None:
        """Its score."""
        best = self._retention.best
        return None if best is None else best.score

    # -- when to save -----------------------------------------------------------------------------

    def on_train_start(self, trainer: Any) -> None:
        """Find the folder; a run that is not resumed begins with no checkpoints."""
        super().on_train_start(trainer)
        if not self._resumed:
            self._latest, self._epochs_seen = Metrics(), 0
            self._saved_at = self._measured_at = -1

    def on_epoch_start(self) -> None:
        """From now on training goes on: a validation before it is not saved."""
        self._trains = True

    def on_step_end(self, trainer: Any, step: int, epoch: int, loss: Any) -> None:
        """Save every N steps; a skipped step is none."""
        if self._every_steps is None or step % self._every_steps or step == self._saved_at:
            return
        self._saved_at = step
        self._latest["train/loss"] = loss
        self._save(trainer, epoch, step, self._latest)

    def on_validation_end(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        """Save after validation."""
        if not self._trains:
            return
        self._keep(metrics)
        self._measured_at = step
        if self._every_steps is not None:
            if step == self._saved_at:  # the same weights, measured only now
                self._retention.rescore(step, self._score(self._latest))
        elif not self._at_epoch_end and step != self._saved_at:
            self._save_in_epoch(trainer, epoch, step, metrics)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        """Save at the end of an epoch."""
        self._epochs_seen += 1
        self._keep(metrics)
        if not _validates(trainer):
            self._measured_at = step
        if self._every_steps is None and self._saves_at_epoch_end(trainer):
            self._save_in_epoch(trainer, epoch, step, metrics)

    def on_train_end(self, trainer: Any, epoch: int, step: int, status: str) -> None:
        """Save the last state, unless training was cut off in the middle of a step."""
        if self._save_last and status in ("completed", "stopped") and step > max(0, self._saved_at):
            self._saved_at = step
            self._trains = False
            # Without a validation of these very weights they have no score, and rank last.
            self._save(trainer, epoch, step, self._latest if step == self._measured_at else {})
        self._trains = False
        self._release()

    def monitors(self, trainer: Any) -> tuple[str, list[str]]:
        """Return when it looks, and at what."""
        late = self._every_steps is not None or self._saves_at_epoch_end(trainer)
        names = [*([] if self._monitor is None else [self._monitor]), *self._filename.metrics]
        return "on_epoch_end" if late else "on_validation_end", names

    def _saves_at_epoch_end(self, trainer: Any) -> bool:
        return self._at_epoch_end or not _validates(trainer)

    # -- saving -----------------------------------------------------------------------------------

    def _save_in_epoch(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        if (epoch + 1) % self._every_epochs == 0:
            self._saved_at = step
            self._save(trainer, epoch, step, metrics)

    def _save(self, trainer: Any, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        score = self._score(metrics)
        if score is not None and not math.isfinite(score) and self._monitor in metrics:
            log.warning("'%s' is %s at step %d: it ranks last.", self._monitor, score, step)
        if self._retention.would_keep(score):
            name = self._filename.render(epoch, step, lambda field: self._value(metrics, field))
            trainer.save_checkpoint(self._retention.reserve(name, step, score))

    def _score(self, metrics: Mapping[str, Any]) -> float | None:
        return None if self._monitor is None else self._value(metrics, self._monitor)

    def _value(self, metrics: Mapping[str, Any], name: str) -> float:
        """A metric's value; NaN while it may still come, or when training has ended before it."""
        early = self._every_steps is not None and not self._epochs_seen
        if name not in metrics and (early or not self._trains):
            return math.nan
        return monitored(metrics, name, type(self).__name__)

    def _keep(self, metrics: Any) -> None:
        for name, value in dict.items(metrics):  # unread
            self._latest[name] = value

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that are known with their scores, and the latest metrics."""
        return super().state_dict() | {
            "monitor": self._monitor,
            "mode": self._mode,
            "latest": {n: v for n, v in self._latest.items() if isinstance(v, int | float)},
            "saved_at": self._saved_at,
            "epochs_seen": self._epochs_seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back. Scores of another metric say nothing: these checkpoints are left alone."""
        before = state["monitor"], None if state["monitor"] is None else state["mode"]
        now = self._monitor, None if self._monitor is None else self._mode
        if before == now:
            super().load_state_dict(state)
        else:
            log.warning(
                "ModelCheckpoint ranked by %s before and by %s now: it starts afresh, and leaves "
                "the checkpoints of before alone.",
                before,
                now,
            )
        self._latest = Metrics(state["latest"])
        self._saved_at, self._epochs_seen = int(state["saved_at"]), int(state["epochs_seen"])


def _validates(trainer: Any) -> bool:
    """Whether validation will come at all."""
    config = trainer.config
    when = config.validate_every_epochs, config.validate_every_steps
    return trainer.validates and when != (None, None)
