"""LoggingHook: logs progress with Python's `logging`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from hookline.hook import HookGroup
from hookline.hooks.metric_lookup import metrics_text
from hookline.masking import mask_text
from hookline.options import BuiltIn
from hookline.printable import printable_message
from hookline.runs.location import shorten_path
from hookline.tensors.name_patterns import module_class

log = logging.getLogger("hookline.training")

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class LoggingHook(BuiltIn):
    """Logs the start, epochs, validations, checkpoints, exceptions and end of training.

    Records go to the logger `hookline.training`. If the program has not configured logging, they
    are shown on stderr during training.

    Args:
        level: the level of the records; exceptions are always logged as errors.
    """

    cost = "Nothing per batch; metrics are read at the end of epochs and validations."
    hookline_group = HookGroup.WRITER
    ranks = "main"
    hookline_optional_events = frozenset(
        {"on_epoch_end", "on_validation_end", "on_checkpoint_save", "on_checkpoint_load"}
    )

    def __init__(self, level: Level = "INFO") -> None:
        self._level = logging.getLevelNamesMapping()[level]
        self._started_at: float | None = None

    def on_train_start(self, model: Any, step: int, run: Any = None) -> None:
        self._started_at = time.monotonic()
        size = sum(parameter.numel() for parameter in model.parameters())
        folder = "" if run is None else f", in {shorten_path(run.path)}"
        resumed = f" after step {step}" if step else ""
        what = f"{module_class(model).__name__} with {size:,} parameters"
        self._log("Training starts%s: %s%s", resumed, what, folder)

    def on_epoch_end(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> None:
        if self._is_shown:  # reading metrics may wait for the device
            self._log("Epoch %d ends at step %d: %s", epoch, step, metrics_text(metrics))

    def on_validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._is_shown:
            self._log("Validation at step %d: %s", step, metrics_text(metrics))

    def on_checkpoint_save(self, checkpoint_path: Any, step: int) -> None:
        self._log("Checkpoint of step %d: %s", step, checkpoint_path)

    def on_checkpoint_load(self, checkpoint_path: Any, step: int) -> None:
        self._log("Restored step %d from %s", step, checkpoint_path)

    def on_exception(self, exception: BaseException, step: int) -> None:
        text, kind = "Training fails at step %d: %s: %s", type(exception).__name__
        self._log(text, step, kind, exception, level=logging.ERROR)

    def on_train_end(self, status: str, step: int) -> None:
        took = ""
        if self._started_at is not None:
            took = f" in {timedelta(seconds=int(time.monotonic() - self._started_at))}"
        self._log("Training ends: %s at step %d%s", status, step, took)
        self._started_at = None

    @property
    def _is_shown(self) -> bool:
        return log.isEnabledFor(self._level) or not log.hasHandlers()

    def _log(self, text: str, *args: Any, level: int | None = None) -> None:
        level = self._level if level is None else level
        if log.hasHandlers():
            log.log(level, text, *args)
        else:  # logging is not configured
            start = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {logging.getLevelName(level)}"
            print(start, printable_message(mask_text(text % args)), file=sys.stderr)
