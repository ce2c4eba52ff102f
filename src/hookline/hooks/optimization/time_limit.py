"""TimeLimit: ends training in time."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from hookline.errors import ConfigError
from hookline.hook import Rank
from hookline.hooks.number_text import duration_text
from hookline.options import BuiltIn

__all__ = ["TimeLimit"]

log = logging.getLogger("hookline")

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WORDS = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms])")
_CLOCK = re.compile(r"(?:(\d+)[-:])?(\d+):(\d\d):(\d\d)")


class TimeLimit(BuiltIn):
    """Ends training at the end of the step in which the time is up.

    A time is a number of seconds, a `timedelta`, or a text: "30m", "1h 30m", "1.5d", "12:00:00",
    "2-12:00:00" (days first).

    Args:
        limit: how long training may take, from its start.
        margin: end so much earlier, so that there is time for what comes after.
        total: count the time before a resume, too.
        checkpoint: save a checkpoint then, where the trainer has a run folder.
    """

    cost = "Reads a clock in every batch."
    hookline_rank = Rank.CONTROL
    hookline_optional_events = frozenset({"on_validation_end"})
    intervenes = True

    def __init__(
        self,
        limit: str | float | timedelta,
        margin: str | float | timedelta = 0,
        total: bool = False,
        checkpoint: bool = True,
    ) -> None:
        self._limit, taken = _seconds("limit", limit), _seconds("margin", margin)
        self._allowed = self._limit - taken
        if self._allowed <= 0:
            raise ConfigError(
                f"TimeLimit: the limit of {self._limit:g} s less the margin of {taken:g} s leaves "
                "no time to train."
            )
        self._total, self._checkpoint = total, checkpoint
        self._before = 0.0  # seconds, in parts of the run before a resume
        self._began: float | None = None
        self._end = 0.0
        self._stopped = False

    def on_train_start(self, trainer: Any) -> None:
        """Start the clock."""
        self._stopped = False
        self._began = time.monotonic()
        self._end = self._began + self._allowed - (self._before if self._total else 0.0)
        if self._began >= self._end:  # used up before the resume
            self._stop(trainer, save=False)

    def on_train_batch_end(self, trainer: Any) -> None:
        """End training, when the time is up."""
        if time.monotonic() >= self._end:
            self._stop(trainer, save=self._checkpoint)

    def on_validation_end(self, trainer: Any) -> None:
        """The same, so that no step follows a validation that took too long."""
        if time.monotonic() >= self._end:
            self._stop(trainer, save=self._checkpoint)

    def on_train_end(self) -> None:
        """Stop the clock."""
        self._before, self._began = self._seconds_so_far(), None

    def state_dict(self) -> dict[str, Any]:
        """Return how long training has taken so far."""
        return {"seconds": self._seconds_so_far()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the time back that training had taken."""
        self._before = float(state["seconds"])

    def _seconds_so_far(self) -> float:
        return self._before + (0.0 if self._began is None else time.monotonic() - self._began)

    def _stop(self, trainer: Any, *, save: bool) -> None:
        if self._stopped:
            return  # the rest of a group of batches is being done
        if self._began is None:  # it came in while training was under way
            self.on_train_start(trainer)
            return
        self._stopped = True
        trainer.stop(f"the time limit of {duration_text(self._limit)} is reached")
        has_place = getattr(trainer, "run", None) is not None
        if save and has_place and hasattr(trainer, "save_checkpoint"):  # a bare loop has none
            trainer.save_checkpoint()


def _seconds(name: str, given: str | float | timedelta) -> float:
    """Return a time in seconds."""
    seconds: float | None = None
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, str):
        seconds = _read(given.strip())
    elif not isinstance(given, bool):
        seconds = float(given)
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        raise ConfigError(
            f"TimeLimit: '{name}' is {given!r}. Expected seconds, a timedelta, or a text such as "
            "'30m', '1h 30m', '12:00:00' or '2-12:00:00'."
        )
    return seconds


def _read(text: str) -> float | None:
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        usual = minutes < 60 and seconds < 60
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds if usual else None
    if text and not _WORDS.sub("", text).strip():
        return math.fsum(float(number) * _UNITS[unit] for number, unit in _WORDS.findall(text))
    try:
        return float(text)  # as configuration files may write a number
    except ValueError:
        return None
