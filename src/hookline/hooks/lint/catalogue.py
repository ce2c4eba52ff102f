"""All checks of `Lint`, in the order of their rules."""

from __future__ import annotations

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.gradient_checks import GRADIENT_CHECKS
from hookline.hooks.lint.update_checks import UPDATE_CHECKS

CHECKS: tuple[type[Check], ...] = (
    *UPDATE_CHECKS,
    *GRADIENT_CHECKS,
)
