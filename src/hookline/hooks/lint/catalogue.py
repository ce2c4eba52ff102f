"""All checks of `Lint`, in the order of their rules."""

from __future__ import annotations

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.gradient_checks import GRADIENT_CHECKS
from hookline.hooks.lint.label_checks import LABEL_CHECKS
from hookline.hooks.lint.leak_checks import LEAK_CHECKS

CHECKS: tuple[type[Check], ...] = (
    *GRADIENT_CHECKS,
    *LEAK_CHECKS,
    *LABEL_CHECKS,
)
