"""All checks of `Lint`, in the order of their rules."""

from __future__ import annotations

from collections.abc import Iterator

from hookline.hooks.lint import (
    average_checks,
    data_checks,
    gradient_checks,
    label_checks,
    leak_checks,
    microbatch_checks,
    mode_checks,
    precision_checks,
    record_checks,
    replica_checks,
    restore_checks,
    tie_checks,
    update_checks,
)
from hookline.hooks.lint.finding import Check

_FILES = (
    update_checks,
    gradient_checks,
    microbatch_checks,
    mode_checks,
    replica_checks,
    tie_checks,
    data_checks,
    leak_checks,
    label_checks,
    restore_checks,
    average_checks,
    record_checks,
    precision_checks,
)
"""One for each rule, from 1."""


def _collect() -> Iterator[type[Check]]:
    """Yield the public checks of each file, and number them by their rule."""
    for number, file in enumerate(_FILES, 1):
        for name, value in vars(file).items():
            is_own = isinstance(value, type) and value.__module__ == file.__name__
            if is_own and issubclass(value, Check) and not name.startswith("_"):
                value.rule = number
                yield value


CHECKS: tuple[type[Check], ...] = tuple(_collect())
