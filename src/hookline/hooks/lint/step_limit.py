"""StepLimit: ends a script that is linted after some steps."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt

from hookline.hook import HookGroup
from hookline.options import BuiltIn


class StepLimit(BuiltIn):
    """Stops training after a number of steps.

    Args:
        steps: how many.
    """

    hookline_group = HookGroup.CONTROL
    intervenes = True
    cost = "Nothing."

    def __init__(self, steps: PositiveInt) -> None:
        self._left: int = steps

    def on_step_end(self, trainer: Any) -> None:
        self._left -= 1
        if not self._left:
            trainer.stop("the number of steps to lint is reached")
