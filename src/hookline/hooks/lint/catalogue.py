"""All checks of `Lint`, in the order of their rules."""

from __future__ import annotations

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.gradient_checks import GRADIENT_CHECKS
from hookline.hooks.lint.label_checks import LABEL_CHECKS
from hookline.hooks.lint.leak_checks import LEAK_CHECKS
from hookline.hooks.lint.microbatch_checks import MICROBATCH_CHECKS
from hookline.hooks.lint.mode_checks import MODE_CHECKS
from hookline.hooks.lint.precision_checks import PRECISION_CHECKS

CHECKS: tuple[type[Check], ...] = (
    *GRADIENT_CHECKS,
    *MICROBATCH_CHECKS,
    *MODE_CHECKS,
    *LEAK_CHECKS,
    *LABEL_CHECKS,
    *PRECISION_CHECKS,
)
