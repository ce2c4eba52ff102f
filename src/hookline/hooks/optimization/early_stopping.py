"""EarlyStopping: ends training when a metric no longer gets better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from hookline.hook import Rank
from hookline.hooks.metric_lookup import Monitors, monitored
from hookline.options import BuiltIn

__all__ = ["EarlyStopping"]

log = logging.getLogger("hookline")


class EarlyStopping(BuiltIn, Monitors):
    """Ends training when a metric has not improved for a number of checks.

    It checks after each validation, or at the end of each epoch. A validation before training is
    no check, and neither is a second one at the same step. In a bare loop it needs
    `session.validation()`, with `session.log("loss", value)` in it, and `session.batches()` to be
    able to stop it.

    Args:
        monitor: the metric.
        patience: after so many checks in a row without an improvement, training ends.
        mode: whether lower or higher is better.
        min_delta: an improvement is more than this.
        check_on_train_epoch_end: check at the end of epochs; else after validation.
        strict: a metric that is not there ends training with an error; else the check is left out.
        verbose: log every check, not only the end.
        stopping_threshold: end as soon as the metric is better than this.
        divergence_threshold: end as soon as the metric is worse than this.
        check_finite: end as soon as the metric is NaN or infinite; else that is no improvement.
    """

    hookline_rank = Rank.CONTROL
    cost = "One number is read from the device per check."

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
        divergence_threshold: float | None = None,
        check_finite: bool = True,
    ) -> None:
        self._monitor, self._patience, self._mode = monitor, patience, mode
        self._min_delta = min_delta
        self._verbose = verbose
        self._stopping, self._divergence = stopping_threshold, divergence_threshold
        self._check_finite = check_finite
        self.critical = strict  # type: ignore[misc] # an error that ends training
        # What is not asked for is not demanded of a bare loop.
        if check_on_train_epoch_end:
            self.on_validation_end = None  # type: ignore[method-assign, assignment]
        else:
            self.on_epoch_end = None  # type: ignore[method-assign, assignment]
        self._runs = self._resumed = self._sanity_comes = self._told_missing = False
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.best_score: float | None = None
        self.wait_count = 0
        self._checked_at = 0  # nothing to check before the first step

    # -- events -----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any) -> None:
        """Count from the beginning, unless the run is resumed."""
        if not self._resumed:
            self._start_afresh()
        self._runs = True
        self._told_missing = False
        self._sanity_comes = bool(getattr(trainer.config, "sanity", False))

    def on_validation_end(self, trainer: Any, step: int, metrics: Any) -> None:
        """Check after a validation, unless nothing was trained since the last."""
        sanity, self._sanity_comes = self._sanity_comes, False
        if self._runs and not sanity and step != self._checked_at:
            self._check(trainer, step, metrics)

    def on_epoch_end(self, trainer: Any, step: int, metrics: Any) -> None:
        """Check at the end of an epoch."""
        self._check(trainer, step, metrics)

    def on_train_end(self) -> None:
        """Validations after training are no checks."""
        self._runs = self._resumed = False

    # -- the check --------------------------------------------------------------------------------

    def monitors(self, trainer: Any) -> tuple[str, list[str]]:
        """Return when it looks, and at what; at nothing it needs, where it can do without."""
        event = "on_epoch_end" if self.on_validation_end is None else "on_validation_end"
        return event, [self._monitor] if self.critical else []

    def _check(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        if not self.critical and self._monitor not in metrics:
            if not self._told_missing:
                log.warning("EarlyStopping: '%s' is not among the metrics.", self._monitor)
            self._told_missing = True
            return
        value = monitored(metrics, self._monitor, "EarlyStopping", trainer)
        self._checked_at = step
        reason = self._judge(value)
        if self._verbose:
            log.info(
                "EarlyStopping: %s is %.6g at step %d; the best is %s, %d of %d checks without an "
                "improvement.",
                self._monitor,
                value,
                step,
                _shown(self.best_score),
                self.wait_count,
                self._patience,
            )
        if reason is not None:
            log.info("EarlyStopping ends training at step %d: %s", step, reason)
            trainer.stop(f"EarlyStopping: {reason}")

    def _judge(self, value: float) -> str | None:
        """Take note of a value; return why training is to end, if it is."""
        name = self._monitor
        if self._check_finite and not math.isfinite(value):
            return f"{name} is {value}."
        if self._stopping is not None and self._is_better(value, self._stopping):
            self._take(value)
            return f"{name} is {value:.6g}, which is better than {self._stopping:g}."
        if self._divergence is not None and self._is_better(self._divergence, value):
            return f"{name} is {value:.6g}, which is worse than {self._divergence:g}."
        if math.isfinite(value) and self._is_improvement(value):
            self._take(value)
            return None
        self.wait_count += 1
        if self.wait_count < self._patience:
            return None
        more = f" by more than {self._min_delta:g}" if self._min_delta else ""
        return (
            f"{name} has not improved{more} in {self.wait_count} checks. It is {value:.6g}, and "
            f"the best was {_shown(self.best_score)} (mode '{self._mode}')."
        )

    def _take(self, value: float) -> None:
        self.best_score, self.wait_count = value, 0

    def _is_improvement(self, value: float) -> bool:
        if self.best_score is None:
            return True
        lead = self.best_score - value if self._mode == "min" else value - self.best_score
        return lead > self._min_delta

    def _is_better(self, value: float, than: float) -> bool:
        return value < than if self._mode == "min" else value > than

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {
            "best_score": self.best_score,
            "wait_count": self.wait_count,
            "checked_at": self._checked_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self.best_score = state["best_score"]
        self.wait_count, self._checked_at = int(state["wait_count"]), int(state["checked_at"])
        self._resumed = True


def _shown(score: float | None) -> str:
    return "none yet" if score is None else f"{score:.6g}"
