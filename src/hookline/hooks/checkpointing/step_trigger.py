"""Triggers between steps: every N steps, or every N minutes."""

from __future__ import annotations

from time import monotonic

__all__ = ["StepTrigger"]


class StepTrigger:
    """Whether a checkpoint is due after a step.

    Args:
        steps: The number of steps between checkpoints, or None.
        minutes: The number of minutes between checkpoints, or None. They count from the start of
            training, and are not saved: a resumed run counts from its own start.

    Attributes:
        is_used: Whether there is any such trigger.
    """

    def __init__(self, *, steps: int | None, minutes: float | None) -> None:
        self._steps = steps
        self._seconds = None if minutes is None else 60 * minutes
        self._last = monotonic()
        self.is_used = steps is not None or minutes is not None

    def start(self) -> None:
        """Count minutes from now."""
        self._last = monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due, and count its minutes from now if so."""
        if self._seconds is not None:
            now = monotonic()
            if now - self._last < self._seconds:
                return False
            self._last = now
            return True
        return self._steps is not None and step % self._steps == 0
