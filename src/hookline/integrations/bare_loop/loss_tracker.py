"""The losses of batches and steps in a bare loop.

The loop may give them (`session.backward(loss)`). Otherwise the loss is the tensor that backward
was called on, if backward ran once in the step. With gradient accumulation, an unchanged loop
usually divides the loss by a number that cannot be seen; then the loss is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hookline.context import LazyFloat
from hookline.integrations.bare_loop.backward_frame import differentiated_tensor
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext
from hookline.integrations.bare_loop.requirements import CALLS

__all__ = ["LossTracker"]


@dataclass
class BackwardLoss:
    """The loss of one backward, None if it is not known, and whether the loop gave it."""

    loss: torch.Tensor | None
    given: bool


class LossTracker:
    """The losses of the step and of the batch in progress."""

    def __init__(self, context: BareLoopEventContext, scaler: torch.amp.GradScaler | None) -> None:
        self.wanted = False
        self._context = context
        self._scaler = scaler
        parameters = context.optimizer.param_groups[0]["params"]
        self._parameter = next((p for p in parameters if p.requires_grad), parameters[0])
        self._step: list[BackwardLoss] = []
        self._batch: list[BackwardLoss] = []
        self._first: list[BackwardLoss] = []
        self._is_given = False
        self._once_per_step: bool | None = None  # learned from the first step

    def set_loss(self, loss: torch.Tensor | None) -> None:
        """Set the loss that the loop runs backward on; None after it."""
        self._is_given = loss is not None
        if loss is not None and self.wanted:
            self._add(BackwardLoss(loss.detach(), given=True))

    def backward_begins(self) -> None:
        """Read the loss while backward runs."""
        if not self._is_given:
            self._add(BackwardLoss(self._unscaled(differentiated_tensor()), given=False))

    def _add(self, seen: BackwardLoss) -> None:
        if self._parameter.grad is None:  # gradients were dropped since the last backward, if any
            self._step.clear()
        self._step.append(seen)
        self._batch.append(seen)

    def _unscaled(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        if loss is None:
            return None
        loss = loss.detach()
        if self._scaler is None or not self._scaler.is_enabled():
            return loss
        return loss / self._scaler.scale(torch.ones_like(loss))  # on the device; nothing waits

    def keep_first(self) -> None:
        """Keep the loss of a closure's first evaluation as that of the step."""
        self._first = list(self._step)

    def batch_begins(self) -> None:
        """Forget the losses of the batch before."""
        self._batch.clear()

    def set_batch_loss(self) -> LazyFloat | None:
        """Set the context's loss to that of the batch that ends; return it."""
        loss, why = _mean(self._batch)
        is_read = any(not seen.given for seen in self._batch)
        if loss is not None and is_read and not self._once_per_step:
            loss = None
            why = (
                ", because the batch ended without a step, and it cannot be seen whether "
                f"its loss was divided. {CALLS['backward']}"
            )
        self._context.known_loss, self._context.why_no_loss = loss, why
        return loss

    def set_step_loss(self) -> None:
        """Set the context's loss to that of the step."""
        loss, why = _mean(self._first or self._step)
        self._context.known_loss, self._context.why_no_loss = loss, why

    def end_step(self) -> None:
        """Learn how often backward runs in a step, and add its loss to the means."""
        if self._once_per_step is None:
            self._once_per_step = len(self._first or self._step) == 1
        loss, _ = _mean(self._first or self._step)
        if loss is not None:
            self._context.latest_loss = loss
            for seen in self._first or self._step:
                self._context.means.add("train/loss", seen.loss)

    def forget(self) -> None:
        """Forget the losses of the step."""
        self._step.clear()
        self._first = []


def _mean(seen: list[BackwardLoss]) -> tuple[LazyFloat | None, str]:
    """Return the mean loss; or None, and why it is not known."""
    losses = [one.loss for one in seen if one.loss is not None]
    if not losses or len(losses) < len(seen):
        return None, f", because backward was not called on a single number. {CALLS['backward']}"
    if len(losses) == 1:
        return LazyFloat(losses[0]), ""
    if not all(one.given for one in seen):
        return None, (
            f", because backward ran {len(seen)} times before the step, and it cannot be "
            f"seen whether each loss was divided. {CALLS['backward']}"
        )
    return LazyFloat(lambda: torch.stack([loss.float().reshape(()) for loss in losses]).mean()), ""
