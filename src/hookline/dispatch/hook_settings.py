"""How a manager treats its hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

__all__ = ["HookSettings"]


@dataclass(frozen=True)
class HookSettings:
    """How failing and costly hooks are treated.

    Args:
        isolate: log and count a hook's exception and go on; False lets it through, for debugging.
        max_failures: after so many failures in a row a hook is quarantined.
        budget: the share of the run that hooks may take before the costliest is named, once;
            None to never name any.
        budget_after: seconds of training before the budget is looked at.
        log_errors: log each failure with its traceback; the summary counts them in any case.
    """

    isolate: bool = True
    max_failures: Annotated[int, Gt(0)] = 3
    budget: Annotated[float, Gt(0)] | None = 0.05
    budget_after: Annotated[float, Ge(0)] = 5.0
    log_errors: bool = True
