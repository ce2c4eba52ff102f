"""LoggingHook: how training goes, through Python's `logging`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from hookline.hook import Rank
from hookline.hooks.number_text import duration_text, metrics_text
from hookline.options import BuiltIn

__all__ = ["LoggingHook"]

log = logging.getLogger("hookline.training")

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class LoggingHook(BuiltIn):
    """Logs start, epochs, validations, checkpoints, exceptions and end of training.

    Everything goes to the logger `hookline.training`. A program that has set up no logging at all
    sees the lines on stderr while it trains.

    Args:
        level: the level of the lines; an exception is always an error.
    """

    cost = "Nothing per batch; the metrics are read at the end of epochs and validations."
    hookline_rank = Rank.WRITER
    hookline_optional_events = frozenset(
        {"on_epoch_end", "on_validation_end", "on_checkpoint_save", "on_checkpoint_load"}
    )

    def __init__(self, level: Level = "INFO") -> None:
        self._level = logging.getLevelNamesMapping()[level]
        self._began: float | None = None
        self._own_handler: tuple[logging.Handler, int] | None = None

    def on_train_start(self, model: Any, step: int, run: Any = None) -> None:
        """Say what is trained."""
        self._began = time.monotonic()
        self._make_visible()
        size = sum(parameter.numel() for parameter in model.parameters())
        where = "" if run is None else f", in {run.path}"
        resumed = f" after step {step}" if step else ""
        self._say(
            "Training starts%s: %s with %s parameters%s",
            resumed,
            type(model).__name__,
            f"{size:,}",
            where,
        )

    def on_epoch_end(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        """Say what the epoch's metrics are."""
        if self._is_heard():
            self._say("Epoch %d ends at step %d: %s", epoch, step, metrics_text(metrics))

    def on_validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say what validation has found."""
        if self._is_heard():
            self._say("Validation at step %d: %s", step, metrics_text(metrics))

    def on_checkpoint_save(self, checkpoint_path: Any, step: int) -> None:
        """Say where the checkpoint is."""
        self._say("Checkpoint of step %d: %s", step, checkpoint_path)

    def on_checkpoint_load(self, checkpoint_path: Any, step: int) -> None:
        """Say what training goes on from."""
        self._say("Restored step %d from %s", step, checkpoint_path)

    def on_exception(self, exception: BaseException, step: int) -> None:
        """Say what went wrong; the traceback comes with the exception itself."""
        log.error("Training fails at step %d: %s: %s", step, type(exception).__name__, exception)

    def on_train_end(self, status: str, step: int) -> None:
        """Say how it ended."""
        took = "" if self._began is None else f" in {duration_text(time.monotonic() - self._began)}"
        self._say("Training ends: %s at step %d%s", status, step, took)
        self._began = None
        self._leave_logging_as_it_was()

    def _say(self, text: str, *args: Any) -> None:
        log.log(self._level, text, *args)

    def _is_heard(self) -> bool:
        """Whether anybody gets the lines: reading metrics for nobody would wait for nothing."""
        return log.isEnabledFor(self._level)

    def _make_visible(self) -> None:
        """Show lines on stderr in a program without logging, until the end of this training."""
        if log.hasHandlers() or self._own_handler is not None:
            return
        handler = logging.StreamHandler(sys.stderr)  # a progress bar stands for it by now
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._own_handler = handler, log.level
        log.addHandler(handler)
        if not log.isEnabledFor(self._level):
            log.setLevel(self._level)

    def _leave_logging_as_it_was(self) -> None:
        if self._own_handler is not None:
            handler, level = self._own_handler
            log.removeHandler(handler)
            log.setLevel(level)
            self._own_handler = None
