"""Rule 12, the record is true: a value that is not finite reaches the logs as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.hooks.lint.finding import Check


class NonfiniteLossHidden(Check):
    """The loss is not finite, and the logs show another number.

    Hugging Face's Trainer replaces a loss that is NaN or infinite by the mean of the others on its
    way to the logs (`logging_nan_inf_filter`, which is on by default): training that has failed
    looks healthy.

    Bug:
        TrainingArguments(...)  # logging_nan_inf_filter=True is the default
    Fix: `TrainingArguments(logging_nan_inf_filter=False)`, and find where the loss becomes NaN
        (`hookline.DebugHook`).
    Ignore: Never: the loss that is shown was not computed.
    """

    def on_train_start(self) -> None:
        if not getattr(self.view.known("config"), "logging_nan_inf_filter", False):
            self.left_out = "this loop does not replace values in its logs"

    def on_before_backward(self, loss: Any) -> None:
        if isinstance(loss, Tensor):
            self.read([torch.isfinite(loss.detach()).all()], self._judge)

    def _judge(self, numbers: list[float]) -> None:
        if not numbers[0]:
            self.find(
                "loss",
                "The loss of this step is not finite, but the Trainer's logs replace it "
                "(logging_nan_inf_filter=True).",
            )
