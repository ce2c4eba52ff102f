"""ModelCheckpoint, which keeps the best checkpoints by a metric, and SavingHook, its base."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from string import Formatter
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from hookline.arguments import show_value, user_path
from hookline.checkpoint.retention import Retention
from hookline.context import LazyFloat, Metrics
from hookline.errors import CheckpointError, ConfigError, TrainingError, listed
from hookline.hook import HookGroup
from hookline.hooks.metric_lookup import RequiresMetrics, metric_value, missing_text
from hookline.options import BuiltIn

log = logging.getLogger("hookline")

_COUNTERS = ("epoch", "step")  # fields of a filename that are not metrics


class SavingHook(BuiltIn):
    """Saves through the trainer; a `Retention` decides which checkpoints are kept.

    A save that is requested in an event happens at the next step boundary, and `on_checkpoint_save`
    comes at a later one, when the checkpoint is durable. Only then is the retention updated. If the
    save failed, `checkpoint_failed` is called instead.

    A hook that is added in the middle of a run manages the checkpoints that it saves itself.

    The hook is critical: without a folder, or without the metric to rank by, there would be no
    checkpoints. What goes wrong when a checkpoint is removed is logged, and training continues,
    unless `checkpoints.on_failure` of the trainer's configuration is `stop`.
    """

    critical = True
    hookline_group = HookGroup.CHECKPOINT
    ranks = "main"

    _retention: Retention
    _folder: Path | None = None
    _resumed = False
    _opened: tuple[str | None, Path] | None = None  # the run and the folder it was opened for

    def on_train_start(self, trainer: Any) -> None:
        self._opened = None
        self._open(trainer)

    def _open(self, trainer: Any) -> None:
        """Find the folder: when training starts, or if the hook was added in mid-run."""
        folder = self._find_folder(trainer)
        if self._opened != (_run_id(trainer), folder):
            self._retention.open(folder, resumed=self._resumed)
            self._opened = _run_id(trainer), folder

    def on_checkpoint_load(self, trainer: Any, checkpoint_path: Any) -> None:
        if self._resumed:
            with logged_failures(trainer):
                self._retention.reconcile(
                    Path(checkpoint_path), writer=self._name_in(trainer), run_id=_run_id(trainer)
                )

    def _name_in(self, trainer: Any) -> str:
        hooks = trainer.hooks.of_kind(self.hookline_kind)
        return next((name for name, hook, _ in hooks if hook is self), "")

    def on_checkpoint_save(self, trainer: Any, checkpoint_path: Any) -> None:
        with logged_failures(trainer):
            self._retention.add_saved(Path(checkpoint_path))

    def checkpoint_saved(self, path: str) -> None:
        """Do what `on_checkpoint_save` does; called while the hook is disabled."""
        self.on_checkpoint_save(None, path)

    def checkpoint_failed(self, path: str, error: Exception | None) -> None:
        """Free the name of a checkpoint that was requested and not saved."""
        self._retention.discard(Path(path))

    def save_into_run(self) -> None:
        """Save into the run's folder, whichever folder the user gave."""
        self._folder = None

    def forget_resumed(self) -> None:
        """Start without the checkpoints of the run whose state was loaded: they are another's."""
        self._resumed = False

    def _release(self) -> None:
        self._retention.release()
        self._resumed = False
        self._opened = None

    def state_dict(self) -> dict[str, Any]:
        return {"checkpoints": self._retention.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
                f"{hook} saves through a Trainer or a Session, which this loop does not have. "
                "Attach it: hookline.attach(model, optimizer, hooks=[…])."
            )
        if self._folder is not None:
            return self._folder
        run = getattr(trainer, "run", None)
        if run is None:
            raise TrainingError(
                f"{hook} saves into the run's folder, but this training run has none. Set `runs` "
                "in the configuration, or pass a folder to the hook."
            )
        return Path(run.checkpoints)


def _run_id(trainer: Any) -> str | None:
    run = getattr(trainer, "run", None)
    return None if run is None else str(run.id)


@contextmanager
def logged_failures(trainer: Any) -> Generator[None, None, None]:
    """Log an error with checkpoints that exist already, unless the configuration says `stop`."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        checkpoints = getattr(getattr(trainer, "config", None), "checkpoints", None)
        if getattr(checkpoints, "on_failure", "continue") == "stop":
            raise
        log.error("Training continues, but: %s", error)  # noqa: TRY400 - the message is complete


class ModelCheckpoint(SavingHook, RequiresMetrics):
    """Saves checkpoints, ranks them by a metric, and keeps the best and the last.

    It saves after validation, at the end of epochs, every N steps or every N minutes, and only
    checkpoints that would be kept. Without validation it saves at the end of epochs.

    A checkpoint is kept if it is among the best, among the newest, or the first of an interval of
    steps. Others that this hook has written are removed after the next checkpoint is durable, but
    never those that the files `best` and `last` in the folder name. Of two equal scores the earlier
    is better. NaN and infinities rank last, the newest first, and are never the best; so do
    checkpoints that are saved before the metric is first measured. The second of these is a
    warning, unless validation is still to come.

    Args:
        save_top_k: the number of best checkpoints to keep; 0: none, if another option keeps some;
            -1: all.
        monitor: the metric to rank by, such as `val/loss`; None: the newest is the best.
        mode: whether lower (`min`) or higher (`max`) is better.
        save_last: save every time and at the end of training, and also keep the newest checkpoint,
            whatever its rank.
        save_on_train_epoch_end: save at the end of epochs instead of after validation.
        every: save every N steps instead, ranked by the latest value of the metric.
        every_n_epochs: save only in every N-th epoch.
        every_n_minutes: save every N minutes instead, at the end of a step.
        keep_last: also keep the N newest checkpoints, whatever their rank.
        keep_every: of every M steps, also keep the first checkpoint for ever.
        filename: the checkpoint's name, with `epoch`, `step` and metrics in braces.
        auto_insert_metric_name: write `{epoch}` as `epoch=3`; False: as `3`.
        folder: where to save; None: in the run's `checkpoints` folder.
        save_weights_only: save only the model's weights, in a fraction of the space. No run can be
            resumed from such a checkpoint, and `last` does not name it: resuming uses the newest
            one with all of the state, which another hook or a signal saves.
    """

    every_name = "every_n_steps"
    cost = (
        "The time of a checkpoint when it saves; nothing between saves, or one comparison per step "
        "with every and every_n_minutes."
    )

    def __init__(
        self,
        save_top_k: Annotated[int, Field(ge=-1)] = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_last: bool = False,
        save_on_train_epoch_end: bool = False,
        every: PositiveInt | None = None,
        every_n_epochs: PositiveInt | None = None,
        every_n_minutes: PositiveFloat | None = None,
        keep_last: PositiveInt | None = None,
        keep_every: PositiveInt | None = None,
        filename: str = "{epoch}-{step}",
        auto_insert_metric_name: bool = True,
        folder: str | Path | None = None,
        save_weights_only: bool = False,
    ) -> None:
        _check_triggers(
            every=every,
            every_n_minutes=every_n_minutes,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
        )
        _check_retention(save_top_k, save_last, keep_last=keep_last, keep_every=keep_every)
        self._monitor, self._mode = monitor, mode
        self._at_epoch_end, self._every_epochs = save_on_train_epoch_end, every_n_epochs or 1
        self._every_steps, self._every_minutes = every, every_n_minutes
        self._saves_between_steps = bool(every or every_n_minutes)
        self._last_time = monotonic()  # not saved: a resumed run counts minutes from its own start
        self._filename = _Filename(filename, insert_names=auto_insert_metric_name)
        self._folder = None if folder is None else user_path(folder)
        self._save_last = save_last
        self.saves_weights_only = save_weights_only
        newest = max(keep_last or 0, int(save_last))
        if monitor is None:  # the newest are the best
            newest = -1 if save_top_k == -1 else max(newest, save_top_k)
        self._retention = Retention(
            keep_best=0 if monitor is None else save_top_k,
            mode=mode,
            keep_last=newest,
            keep_every=keep_every,
            weights_only=save_weights_only,
        )
        self._latest_metrics = Metrics()
        self._saved_step = self._measured_step = -1
        self._epochs_ended = 0
        self._is_training = self._has_validated = False
        self._saved_without_metric = 0
        if self._saves_between_steps:  # then a loop that does not provide epochs is enough
            self.hookline_optional_events = frozenset(  # type: ignore[misc]
                {"on_epoch_start", "on_epoch_end", "on_validation_end"}
            )
        else:
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
        super().on_train_start(trainer)
        self._last_time = monotonic()
        if not self._resumed:
            self._latest_metrics, self._epochs_ended = Metrics(), 0
            self._saved_step = self._measured_step = -1

    def on_epoch_start(self) -> None:
        self._is_training = True

    def on_step_end(
        self, trainer: Any, step: int, epoch: int = 0, loss: LazyFloat | None = None
    ) -> None:
        """Save every N steps or minutes; skipped steps are not counted."""
        self._is_training = True
        if step == self._saved_step or not step or not self._is_due(step):
            return
        self._saved_step = step
        if loss is not None:
            self._latest_metrics["train/loss"] = loss
        self._save(trainer, epoch, step, self._latest_metrics)

    def _is_due(self, step: int) -> bool:
        if self._every_minutes is None:
            return self._every_steps is not None and step % self._every_steps == 0
        now = monotonic()
        if now - self._last_time < 60 * self._every_minutes:
            return False
        self._last_time = now
        return True

    def on_validation_end(self, trainer: Any, step: int, metrics: Any, epoch: int = 0) -> None:
        """Save after validation, or update the score of the step's checkpoint."""
        if not self._is_training:
            return
        self._keep_metrics(metrics)
        self._measured_step, self._has_validated = step, True
        if self._saves_between_steps:
            if step == self._saved_step:  # the same weights, whose score is known only now
                with logged_failures(trainer):
                    self._retention.rescore(step, self._score(self._latest_metrics, step))
        elif not self._at_epoch_end and step != self._saved_step:
            self._save_in_epoch(trainer, epoch, step, metrics)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        self._epochs_ended += 1
        self._keep_metrics(metrics)
        if not self._validates(trainer):
            self._measured_step = step
        if not self._saves_between_steps and self._saves_at_epoch_end(trainer):
            self._save_in_epoch(trainer, epoch, step, metrics)

    def on_train_end(self, trainer: Any, step: int, status: str, epoch: int = 0) -> None:
        """Save the last state, unless training was interrupted in the middle of a step."""
        if (
            self._save_last
            and status in ("completed", "stopped")
            and step > max(0, self._saved_step)
        ):
            self._saved_step = step
            self._is_training = False
            # Weights that were not validated have no score, and rank last.
            metrics = self._latest_metrics if step == self._measured_step else {}
            self._save(trainer, epoch, step, metrics)
        self._is_training = False
        self._release()

    def required_metrics(self, trainer: Any) -> tuple[str, list[str]]:
        """Return the event in which it saves, and the metrics for ranks and names."""
        late = self._saves_between_steps or self._saves_at_epoch_end(trainer)
        names = [*([] if self._monitor is None else [self._monitor]), *self._filename.metrics]
        return "on_epoch_end" if late else "on_validation_end", names

    def _saves_at_epoch_end(self, trainer: Any) -> bool:
        return self._at_epoch_end or not self._validates(trainer)

    def _validates(self, trainer: Any) -> bool:
        """Return whether the loop validates; one that does not say so, whether it has so far."""
        config: Any = getattr(trainer, "config", None)
        if not hasattr(config, "validate_every_epochs"):
            return self._has_validated
        when = config.validate_every_epochs, config.validate_every_steps
        return bool(trainer.validates) and when != (None, None)

    # -- saving -----------------------------------------------------------------------------------

    def _save_in_epoch(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        if (epoch + 1) % self._every_epochs == 0:
            self._saved_step = step
            self._save(trainer, epoch, step, metrics)

    def _save(self, trainer: Any, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        self._open(trainer)
        score = self._score(metrics, step)
        if score is not None and not math.isfinite(score) and self._monitor in metrics:
            log.warning(
                "'%s' is %s at step %d, so this checkpoint ranks last.", self._monitor, score, step
            )
        if self._retention.would_keep(step, score):
            name = self._filename.render(
                epoch, step, lambda field: self._value(metrics, field, step)
            )
            path = self._retention.reserve(name, step, score)
            trainer.save_checkpoint(path, weights_only=self.saves_weights_only)
            self._warn_of_missing_metric(trainer, step)

    def _warn_of_missing_metric(self, trainer: Any, step: int) -> None:
        """Warn once, at the second checkpoint without the metric, unless validation is to come."""
        if self._monitor is None or self._monitor in self._latest_metrics or not self._is_training:
            return
        self._saved_without_metric += 1
        if self._saved_without_metric == 2 and self._has_validated >= self._validates(trainer):
            text = missing_text(self._latest_metrics, self._monitor, type(self).__name__, trainer)
            if hasattr(trainer, "epoch") and not self._monitor.startswith(("val/", "eval/")):
                text += " Means of logged values come at the end of `with session.epoch():`."
            log.warning(
                "%s This is the second checkpoint without it, at step %d: until the metric is "
                "measured, the newest is kept instead of the best.",
                text,
                step,
            )

    def _score(self, metrics: Mapping[str, Any], step: int) -> float | None:
        return None if self._monitor is None else self._value(metrics, self._monitor, step)

    def _value(self, metrics: Mapping[str, Any], name: str, step: int) -> float:
        """Return a metric; NaN if it was not measured for these weights, and may be later."""
        early = self._saves_between_steps and not self._epochs_ended
        if name not in metrics and (early or not self._is_training or step != self._measured_step):
            return math.nan
        return metric_value(metrics, name, type(self).__name__)

    def _keep_metrics(self, metrics: Any) -> None:
        for name, value in dict.items(metrics):  # without reading values from the device
            self._latest_metrics[name] = value

    def checkpoint_failed(self, path: str, error: Exception | None) -> None:
        """Free the checkpoint's name, and save the step again if it is the last one."""
        failed = self._retention.discard(Path(path))
        if failed is not None and failed.step == self._saved_step:
            self._saved_step = -1

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "monitor": self._monitor,
            "mode": self._mode,
            "latest": {n: v for n, v in self._latest_metrics.items() if isinstance(v, int | float)},
            "saved_at": self._saved_step,
            "measured_at": self._measured_step,
            "epochs_seen": self._epochs_ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        self._saved_step, self._measured_step = int(state["saved_at"]), int(state["measured_at"])
        self._epochs_ended = int(state["epochs_seen"])


def _check_triggers(**options: Any) -> None:
    """Raise if two options determine when to save, and neither refines the other."""
    chosen = [name for name, value in options.items() if value]
    if len(chosen) > 1 and chosen[0] in ("every", "every_n_minutes"):
        raise ConfigError(
            f"ModelCheckpoint: {chosen[0]} and {chosen[1]} both determine when to save. Pass one, "
            "or add two hooks."
        )


def _check_retention(save_top_k: int, save_last: bool, **others: int | None) -> None:
    """Raise if no checkpoint is kept, or an option has no effect because all are."""
    if save_top_k == 0 and not save_last and not any(others.values()):
        raise ConfigError(
            "ModelCheckpoint: save_top_k=0 alone keeps no checkpoint. Also pass save_last=True, "
            "keep_last or keep_every, or remove it."
        )
    useless = [name for name, value in others.items() if value is not None]
    if save_top_k == -1 and useless:
        raise ConfigError(
            f"ModelCheckpoint: save_top_k=-1 keeps all checkpoints, so {listed(useless)} has no "
            "effect. Pass a smaller save_top_k, or remove it."
        )


class _Filename:
    """A pattern for checkpoint names, such as `epoch_{epoch}_{val/loss:.2f}`, checked at once.

    With `insert_names`, `{epoch}` is written as `epoch=3` instead of `3`. `metrics` are the names
    of the metrics in the pattern.
    """

    def __init__(self, pattern: str, *, insert_names: bool) -> None:
        self._insert_names = insert_names
        self._fields: list[tuple[str, str | None, str]] = []
        try:
            for text, name, spec, conversion in Formatter().parse(pattern):
                if name is not None:
                    format(1 if name in _COUNTERS else 1.0, spec or "")
                if name == "" or conversion:
                    raise ValueError("a field is 'epoch', 'step' or the name of a metric")
                self._fields.append((text, name, spec or ""))
            if not pattern.strip():
                raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError(
                f"filename is {show_value(pattern)}: {error}. Use a pattern such as "
                "'{epoch}-{step}-{val/loss:.2f}'."
            ) from None
        self.metrics = [name for _, name, _ in self._fields if name and name not in _COUNTERS]

    def render(self, epoch: int, step: int, value_of: Callable[[str], float]) -> str:
        """Return a valid name of a folder; `value_of` returns the value of a metric."""
        counters = {"epoch": epoch, "step": step}
        name = ""
        for text, field, spec in self._fields:
            name += text
            if field is not None:
                value = counters[field] if field in counters else value_of(field)
                name += f"{field}=" if self._insert_names else ""
                name += format(value, spec)
        name = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name)
        return f"_{name}" if name.startswith(".") or name in ("last", "best") else name
