"""Rule 12, the record is true: a value that is not finite reaches the logs as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.training_view import TrainingView


class NonfiniteLossHidden(Check):
    """The loss is not finite, and the logs show another number.

    Hugging Face's Trainer replaces a loss that is NaN or infinite by the mean of the others on its
    way to the logs (`logging_nan_inf_filter`, which is on by default): training that has failed
    looks healthy.

    Bug:
        TrainingArguments(...)  # logging_nan_inf_filter=True is the default

    Fix:
        `TrainingArguments(logging_nan_inf_filter=False)`, and find where the loss becomes NaN
        (`hookline.DebugHook`).

    Ignore:
        Never: the loss that is shown was not computed.
    """

    id = "nonfinite-loss-hidden"
    rule = 12

    def on_train_start(self, view: TrainingView) -> None:
        """Look only where somebody replaces values."""
        if not getattr(view.known("config"), "logging_nan_inf_filter", False):
            self.left_out = "this loop does not replace values in its logs"

    def on_before_backward(self, view: TrainingView, loss: Any) -> None:
        """Measure whether the loss is finite."""
        if isinstance(loss, Tensor):
            view.read([torch.isfinite(loss.detach()).all()], self._judge, view)

    def _judge(self, numbers: list[float], view: TrainingView) -> None:
        if not numbers[0]:
            self.find(
                view,
                "loss",
                f"The loss of step {view.step} is not finite, but the Trainer's logs replace it "
                "(logging_nan_inf_filter=True).",
                "Set logging_nan_inf_filter=False, and find where the loss becomes NaN with "
                "hookline.DebugHook().",
            )


RECORD_CHECKS = (NonfiniteLossHidden,)
