"""TimeLimit: stops training after some time."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from hookline.arguments import show_value
from hookline.errors import ConfigError
from hookline.hook import HookGroup
from hookline.options import BuiltIn

log = logging.getLogger("hookline")

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WORDS = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms])")
_CLOCK = re.compile(r"(?:(\d+)[-:])?(\d+):([0-5]\d):([0-5]\d)")


class TimeLimit(BuiltIn):
    """Stops training at the end of the step in which a time limit is reached.

    A time is a number of seconds, a `timedelta`, or a string: "30m", "1h 30m", "1.5d", "12:00:00",
    "2-12:00:00" (days first).

    Args:
        limit: the time from the start of training.
        margin: stop this much earlier, to leave time for what follows training.
        total: also count the time before the run was resumed.
        checkpoint: save a checkpoint before stopping, if the trainer has a run folder.
    """

    cost = "Reads a clock in every step."
    hookline_group = HookGroup.CONTROL
    hookline_optional_events = frozenset({"on_validation_end"})
    intervenes = True

    def __init__(
        self,
        limit: str | float | timedelta,
        margin: str | float | timedelta = 0,
        total: bool = False,
        checkpoint: bool = True,
    ) -> None:
        self._limit, reserved = _seconds("limit", limit), _seconds("margin", margin)
        self._allowed = self._limit - reserved
        if self._allowed <= 0:
            raise ConfigError(
                f"TimeLimit: the limit of {self._limit:g} s less the margin of {reserved:g} s "
                "leaves no time to train."
            )
        self._total, self._checkpoint = total, checkpoint
        self._before = 0.0  # seconds before the run was resumed
        self._started_at: float | None = None
        self._end = 0.0
        self._stopped = False

    def on_train_start(self, trainer: Any) -> None:
        self._stopped = False
        self._start_clock(trainer)

    def _start_clock(self, trainer: Any) -> None:
        self._started_at = time.monotonic()
        self._end = self._started_at + self._allowed - (self._before if self._total else 0.0)
        if self._started_at >= self._end:  # used up before the resume
            self._stop(trainer, save=False)

    def on_step_end(self, trainer: Any) -> None:
        if time.monotonic() >= self._end:
            self._stop(trainer, save=self._checkpoint)

    on_validation_end = on_step_end

    def on_train_end(self) -> None:
        self._before, self._started_at = self._seconds_so_far(), None

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds_so_far()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = float(state["seconds"])

    def _seconds_so_far(self) -> float:
        started = self._started_at
        return self._before + (0.0 if started is None else time.monotonic() - started)

    def _stop(self, trainer: Any, *, save: bool) -> None:
        if self._stopped:
            return
        if self._started_at is None:  # the hook was added during training
            self._start_clock(trainer)
            return
        self._stopped = True
        trainer.stop(f"the time limit of {timedelta(seconds=int(self._limit))} is reached")
        # A bare loop has no such method.
        if save and getattr(trainer, "run", None) and hasattr(trainer, "save_checkpoint"):
            trainer.save_checkpoint()


def _seconds(option: str, value: str | float | timedelta) -> float:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    else:
        seconds = _parse(value.strip()) if isinstance(value, str) else float(value)
    if isinstance(value, bool) or not 0 <= seconds < math.inf:
        raise ConfigError(
            f"TimeLimit: '{option}' is {show_value(value)}. Expected seconds, a timedelta, or a "
            "string such as '30m', '1h 30m', '12:00:00' or '2-12:00:00'."
        )
    return seconds


def _parse(text: str) -> float:
    """Return the seconds that a text stands for; NaN if it is not a time."""
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(group or 0) for group in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
    if text and not _WORDS.sub("", text).strip():
        return math.fsum(float(number) * _UNITS[unit] for number, unit in _WORDS.findall(text))
    try:
        return float(text)  # a config file may quote a number
    except ValueError:
        return math.nan
