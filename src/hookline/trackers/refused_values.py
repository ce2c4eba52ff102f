"""Values that a tool refuses: the others are logged, and these are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hookline.trackers.tracker import TrackedValue

__all__ = ["RefusedValues", "log_each"]

_MAX_FAILURES = 20  # in a row: then the tool is not there


class RefusedValues(Exception):  # noqa: N818 - not an error of the tracker as a whole
    """Some values were not logged; all others were.

    Attributes:
        count: how many.
        error: why, for the first of them.
    """

    def __init__(self, count: int, error: Exception) -> None:
        super().__init__(f"{count} values were refused, the first one because of: {error!r}")
        self.count, self.error = count, error


def log_each(log: Callable[[TrackedValue], None], values: Iterable[TrackedValue]) -> None:
    """Log values one by one; raise `RefusedValues` at the end if some could not be logged.

    Args:
        log: logs one value.
        values: the values.
    """
    first: Exception | None = None
    refused = in_a_row = 0
    for value in values:
        if in_a_row == _MAX_FAILURES:
            refused += 1
            continue
        try:
            log(value)
            in_a_row = 0
        except Exception as error:
            first = first or error
            refused, in_a_row = refused + 1, in_a_row + 1
    if first is not None:
        raise RefusedValues(refused, first)
