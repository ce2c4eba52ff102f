"""All checks of `Lint`, in the order of their rules."""

from __future__ import annotations

from hookline.hooks.lint.average_checks import AVERAGE_CHECKS
from hookline.hooks.lint.data_checks import DATA_CHECKS
from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.gradient_checks import GRADIENT_CHECKS
from hookline.hooks.lint.label_checks import LABEL_CHECKS
from hookline.hooks.lint.leak_checks import LEAK_CHECKS
from hookline.hooks.lint.microbatch_checks import MICROBATCH_CHECKS
from hookline.hooks.lint.mode_checks import MODE_CHECKS
from hookline.hooks.lint.precision_checks import PRECISION_CHECKS
from hookline.hooks.lint.record_checks import RECORD_CHECKS
from hookline.hooks.lint.replica_checks import REPLICA_CHECKS
from hookline.hooks.lint.restore_checks import RESTORE_CHECKS
from hookline.hooks.lint.tie_checks import TIE_CHECKS
from hookline.hooks.lint.update_checks import UPDATE_CHECKS

CHECKS: tuple[type[Check], ...] = (
    *UPDATE_CHECKS,
    *GRADIENT_CHECKS,
    *MICROBATCH_CHECKS,
    *MODE_CHECKS,
    *REPLICA_CHECKS,
    *TIE_CHECKS,
    *DATA_CHECKS,
    *LEAK_CHECKS,
    *LABEL_CHECKS,
    *RESTORE_CHECKS,
    *AVERAGE_CHECKS,
    *RECORD_CHECKS,
    *PRECISION_CHECKS,
)
