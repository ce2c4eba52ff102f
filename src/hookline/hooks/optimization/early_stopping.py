"""EarlyStopping: stops training when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from hookline.hook import HookGroup
from hookline.hooks.metric_lookup import RequiresMetrics, log_or_print, metric_value
from hookline.options import BuiltIn

log = logging.getLogger("hookline")


class EarlyStopping(BuiltIn, RequiresMetrics):
    """Stops training when a metric has not improved for a number of checks.

    The metric is checked after each validation, or at the end of each epoch. A validation before
    training and a second validation at the same step are not counted. A metric that is NaN or
    infinite stops training at once. In a bare loop it needs
    `session.validation()` with a `session.log("loss", value)` inside; the loop ends if it loads its
    batches with `session.batches()`, or looks at `session.should_stop`.

    Args:
        monitor: the metric.
        patience: the number of checks in a row without an improvement after which training stops.
        mode: whether lower (`min`) or higher (`max`) is better.
        min_delta: an improvement has to be larger than this.
        check_on_train_epoch_end: check at the end of epochs instead of after validation.
        strict: raise an error if the metric is missing; False: skip the check.
        verbose: log every check; print it if the program has not configured logging.
        stopping_threshold: stop as soon as the metric is better than this.

    Attributes:
        best_score: the best value so far; None before the first check.
        wait_count: the number of checks in a row without an improvement.
        stopped_epoch: the epoch in which it has stopped training; 0 if it has not, or if the loop
            does not provide epochs.
    """

    intervenes = True
    hookline_group = HookGroup.CONTROL
    cost = "Reads one number from the device per check."

    def __init__(
        self,
        monitor: str = "val/loss",
        patience: PositiveInt = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: Annotated[float, Field(ge=0)] = 0.0,
        check_on_train_epoch_end: bool = False,
        strict: bool = True,
        verbose: bool = False,
        stopping_threshold: float | None = None,
    ) -> None:
        self._monitor, self._patience, self._mode = monitor, patience, mode
        self._min_delta = min_delta
        self._verbose = verbose
        self._stopping = stopping_threshold
        self.critical = strict  # type: ignore[misc] # its errors stop training
        # The unused event is turned off, so that a bare loop need not provide it.
        if check_on_train_epoch_end:
            self.on_validation_end = None  # type: ignore[method-assign, assignment]
        else:
            self.on_epoch_end = None  # type: ignore[method-assign, assignment]
        self._is_training = self._resumed = self._warned_missing = False
        self._reset()

    def _reset(self) -> None:
        self.best_score: float | None = None
        self.wait_count = self.stopped_epoch = 0
        self._checked_at = 0  # no check before the first step
        self._stop_reason: str | None = None
        self._stop_patience = 0  # the number of checks that it waited for, if that was the reason

    def on_train_start(self, trainer: Any) -> None:
        """Reset the counters, unless the run is resumed."""
        if not self._resumed:
            self._reset()
        self._is_training = True
        self._warned_missing = False
        more_patience = 0 < self._stop_patience < self._patience
        if self._resumed and self._stop_reason is not None and not more_patience:
            # The checkpoint was saved at the step boundary at which training stopped.
            log.info("EarlyStopping had stopped this run. To go on, remove it or wait longer.")
            trainer.stop(self._stop_reason)

    def on_validation_end(self, trainer: Any, step: int, metrics: Any, epoch: int = 0) -> None:
        if self._is_training and step != self._checked_at:
            self._check(trainer, epoch, step, metrics)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int, metrics: Any) -> None:
        self._check(trainer, epoch, step, metrics)

    def on_train_end(self) -> None:
        self._is_training = self._resumed = False

    def required_metrics(self, trainer: Any) -> tuple[str, list[str]]:
        """Return the event of the check, and the metric if it must not be missing."""
        event = "on_epoch_end" if self.on_validation_end is None else "on_validation_end"
        return event, [self._monitor] if self.critical else []

    def _check(self, trainer: Any, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        if not self.critical and self._monitor not in metrics:
            if not self._warned_missing:
                text = "EarlyStopping: the metric '%s' is missing; the check is skipped."
                log.warning(text, self._monitor)
            self._warned_missing = True
            return
        value = metric_value(metrics, self._monitor, "EarlyStopping", trainer)
        self._checked_at = step
        reason = self._evaluate(value)
        if self._verbose:
            log_or_print(
                f"EarlyStopping: {self._monitor} is {value:.6g} at step {step}; the best is "
                f"{_score_text(self.best_score)}, {self.wait_count} of {self._patience} checks "
                "without an improvement."
            )
        if reason is not None:
            log.info("EarlyStopping stops training at step %d: %s", step, reason)
            self._stop_reason, self.stopped_epoch = f"EarlyStopping: {reason}", epoch
            trainer.stop(self._stop_reason)

    def _evaluate(self, value: float) -> str | None:
        """Update the counters; return the reason to stop, if there is one."""
        name = self._monitor
        if not math.isfinite(value):
            return f"{name} is {value}."
        if self._stopping is not None and self._is_better(value, self._stopping):
            self.best_score, self.wait_count = value, 0
            return f"{name} is {value:.6g}, which is better than {self._stopping:g}."
        if self._is_improvement(value):
            self.best_score, self.wait_count = value, 0
            return None
        self.wait_count += 1
        if self.wait_count < self._patience:
            return None
        self._stop_patience = self._patience
        more = f" by more than {self._min_delta:g}" if self._min_delta else ""
        return (
            f"{name} has not improved{more} in {self.wait_count} checks. It is {value:.6g}, and "
            f"the best was {_score_text(self.best_score)} (mode '{self._mode}')."
        )

    def _is_improvement(self, value: float) -> bool:
        if self.best_score is None:
            return True
        gain = self.best_score - value if self._mode == "min" else value - self.best_score
        return gain > self._min_delta

    def _is_better(self, value: float, than: float) -> bool:
        return value < than if self._mode == "min" else value > than

    def state_dict(self) -> dict[str, Any]:
        counters = {"wait_count": self.wait_count, "checked_at": self._checked_at}
        stop = {"stop_reason": self._stop_reason, "stop_patience": self._stop_patience}
        stop["stopped_epoch"] = self.stopped_epoch
        return {"best_score": self.best_score, **counters, **stop}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_score = state["best_score"]
        self.wait_count, self._checked_at = int(state["wait_count"]), int(state["checked_at"])
        self._stop_reason, self._stop_patience = state["stop_reason"], int(state["stop_patience"])
        self.stopped_epoch = int(state.get("stopped_epoch", 0))
        self._resumed = True


def _score_text(score: float | None) -> str:
    return "none yet" if score is None else f"{score:.6g}"
