"""TimeLimit: stops training after some time."""

from __future__ import annotations

import math
import re
import time
from datetime import timedelta
from typing import Any

from hookline.arguments import show_value
from hookline.errors import ConfigError
from hookline.hook import HookGroup
from hookline.options import BuiltIn

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms]?)")
_CLOCK = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")


class TimeLimit(BuiltIn):
    """Stops training at the end of the step in which a time limit is reached.

    Args:
        limit: the time from the start of training, or from where it was resumed: seconds, a
            `timedelta`, or a string such as "30m", "1.5d" or "12:00:00".
        checkpoint: save a checkpoint before stopping, if the trainer has a run folder.
    """

    cost = "Reads a clock in every step."
    hookline_group = HookGroup.CONTROL
    hookline_optional_events = frozenset({"on_validation_end"})
    intervenes = True

    def __init__(self, limit: str | float | timedelta, checkpoint: bool = True) -> None:
        self._limit = _seconds(limit)
        self._checkpoint = checkpoint
        self._end: float | None = None
        self._stopped = False

    def on_train_start(self) -> None:
        self._stopped = False
        self._end = time.monotonic() + self._limit

    def on_step_end(self, trainer: Any) -> None:
        if self._end is None:  # the hook was added during training
            self.on_train_start()
        elif time.monotonic() >= self._end and not self._stopped:
            self._stop(trainer)

    on_validation_end = on_step_end

    def on_train_end(self) -> None:
        self._end = None

    def _stop(self, trainer: Any) -> None:
        self._stopped = True
        trainer.stop(f"the time limit of {timedelta(seconds=int(self._limit))} is reached")
        # A bare loop may have no such method.
        if (
            self._checkpoint
            and getattr(trainer, "run", None)
            and hasattr(trainer, "save_checkpoint")
        ):
            trainer.save_checkpoint()


def _seconds(value: str | float | timedelta) -> float:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    else:
        seconds = _parse(value.strip()) if isinstance(value, str) else float(value)
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise ConfigError(
            f"TimeLimit: 'limit' is {show_value(value)}. Expected seconds, a timedelta, or a "
            "string such as '30m', '1.5d' or '12:00:00'."
        )
    return seconds


def _parse(text: str) -> float:
    """Return the seconds that a text stands for; NaN if it is not a time."""
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = map(int, clock.groups())
        return (hours * 60 + minutes) * 60.0 + seconds
    amount = _AMOUNT.fullmatch(text)
    return float(amount[1]) * _UNITS[amount[2]] if amount else math.nan
