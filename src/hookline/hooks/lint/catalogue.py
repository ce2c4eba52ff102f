"""All checks of `Lint`, in the order of their rules."""

from __future__ import annotations

from hookline.hooks.lint.data_checks import DATA_CHECKS
from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.gradient_checks import GRADIENT_CHECKS
from hookline.hooks.lint.replica_checks import REPLICA_CHECKS
from hookline.hooks.lint.tie_checks import TIE_CHECKS

CHECKS: tuple[type[Check], ...] = (
    *GRADIENT_CHECKS,
    *REPLICA_CHECKS,
    *TIE_CHECKS,
    *DATA_CHECKS,
)
