"""The rule that says when a step of a loop with several optimizers has ended."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

log = logging.getLogger("hookline")


class StepRule:
    """Decides which optimizers have to step before a step has ended.

    All of them have to; or, as soon as one steps again before another one has, the step of that
    one ends each step from then on.

    Args:
        optimizers: the optimizers, as `attach` knows them; more may be appended.
        ends_with: the number of the optimizer whose step ends a step, where the user has said so.

    Attributes:
        ends_with: the number of the optimizer whose step ends a step; None if all of them have to.
        ends_with_batch: whether another library's trainer says when a step has ended.
        may_grow: whether optimizers that nobody has seen yet may step.
    """

    def __init__(self, optimizers: Sequence[Any], ends_with: int | None = None) -> None:
        self._optimizers = optimizers
        self.ends_with = ends_with
        self.ends_with_batch = self.may_grow = False

    def is_complete(self, stepped: Collection[int]) -> bool:
        """Return whether a step has ended in which these optimizers have stepped."""
        if self.ends_with is not None:
            return self.ends_with in stepped
        return len(stepped) == len(self._optimizers) and not self.may_grow

    def repeat(self, i: int, stepped: Collection[int]) -> bool:
        """Learn from an optimizer that steps again; return whether the step ended before that."""
        if self.ends_with_batch or self.ends_with is not None:
            return False
        if len(stepped) < len(self._optimizers):
            self.ends_with = i
            log.info(
                "Optimizer %d (%s) steps again before the others have stepped: from now on, its "
                "step ends a step. To say so at once: attach(…, step_of=optimizer).",
                *(i, type(self._optimizers[i]).__name__),
            )
        self.may_grow = False
        return True

    def load(self, ends_with: int | None) -> None:
        """Restore what a checkpoint has of the rule, unless the user has said otherwise."""
        if self.ends_with is None and ends_with is not None and ends_with < len(self._optimizers):
            self.ends_with = ends_with
