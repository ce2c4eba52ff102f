"""The update that leaves out a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hookline.errors import LoopError
from hookline.hook import UpdateHook
from hookline.options import BuiltIn
from hookline.tensors.sharded import whole
from hookline.updates.gradients import dense

__all__ = ["SkipNonfinite"]


class SkipNonfinite(BuiltIn, UpdateHook):
    """Leaves out an optimizer's step when one of its gradients has a NaN or an infinity.

    Parameters, momentum and schedulers stay as they are; `on_step_skipped` is told. In a bare loop
    the scheduler is the loop's own.
    """

    cost = "One norm of the gradients; it waits for the device in every step."

    def __call__(
        self, gradients: Mapping[str, torch.Tensor], trainer: Any, optimizer_idx: int
    ) -> None:
        """Look, and ask the trainer to leave out the step."""
        tensors = dense(gradients, self)
        norm = whole(torch.nn.utils.get_total_norm(tensors, norm_type=math.inf))
        if torch.isfinite(norm).item():
            return
        skip = getattr(trainer, "skip_optimizer_step", None)
        if skip is None:
            raise LoopError(
                "There are non-finite gradients, and this loop cannot be told to leave out a step. "
                "Use Hookline's trainer, or check for them in the loop."
            )
        skip(optimizer_idx, "non-finite gradients")
