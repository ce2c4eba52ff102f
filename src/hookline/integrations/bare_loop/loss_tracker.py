"""Which loss a batch and a step had.

The loop may tell (`session.backward(loss)`); else it is the tensor that backward was called on,
where that is the loss beyond doubt: backward ran once in the step. With gradient accumulation an
unchanged loop has usually divided it, and nobody can see by what: then it is not known.
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
class Seen:
    """One backward: the loss, where it is known, and whether the loop told it."""

    loss: torch.Tensor | None
    told: bool


class LossTracker:
    """The losses of the step and of the batch in progress."""

    def __init__(self, context: BareLoopEventContext, scaler: torch.amp.GradScaler | None) -> None:
        self.wanted = False
        self._context = context
        self._scaler = scaler
        self._step: list[Seen] = []
        self._batch: list[Seen] = []
        self._first: list[Seen] = []
        self._telling = False
        self._once_per_step: bool | None = None  # learned from the first step

    def told(self, loss: torch.Tensor | None, parameter: torch.Tensor) -> None:
        """The loop runs backward on this loss; None when it is done."""
        self._telling = loss is not None
        if loss is not None and self.wanted:
            self._add(Seen(loss.detach(), told=True), parameter)

    def backward_begins(self, parameter: torch.Tensor) -> None:
        """Autograd has begun; `parameter` is one that it will reach."""
        if not self._telling:
            self._add(Seen(self._unscaled(differentiated_tensor()), told=False), parameter)

    def _add(self, seen: Seen, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # gradients were dropped since the last backward, if any
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
        """A closure was evaluated for the first time: this is the loss of its step."""
        self._first = list(self._step)

    def batch_begins(self) -> None:
        """Another batch was drawn."""
        self._batch.clear()

    def tell_batch(self) -> LazyFloat | None:
        """Tell the context the loss of the batch that ends now."""
        loss, why = _mean(self._batch)
        untold = any(not seen.told for seen in self._batch)
        if loss is not None and untold and not self._once_per_step:
            loss = None
            why = (
                ", because the batch ended without a step, and an unchanged loop cannot tell "
                f"whether its loss was divided. {CALLS['backward']}"
            )
        self._context.known_loss, self._context.why_no_loss = loss, why
        return loss

    def tell_step(self) -> None:
        """Tell the context the loss of the step."""
        loss, why = _mean(self._first or self._step)
        self._context.known_loss, self._context.why_no_loss = loss, why

    def step_ends(self) -> None:
        """Learn from the step, and add its loss to the averages."""
        if self._once_per_step is None:
            self._once_per_step = len(self._first or self._step) == 1
        loss, _ = _mean(self._first or self._step)
        if loss is not None:
            self._context.latest_loss = loss
            for seen in self._first or self._step:
                self._context.averages.add("loss", seen.loss)

    def forget(self) -> None:
        """The step is over."""
        self._step.clear()
        self._first = []


def _mean(seen: list[Seen]) -> tuple[LazyFloat | None, str]:
    """The mean loss; or None, and why it is not known."""
    losses = [one.loss for one in seen if one.loss is not None]
    if not losses or len(losses) < len(seen):
        return None, f", because backward was not called on a single number. {CALLS['backward']}"
    if len(losses) == 1:
        return LazyFloat(losses[0]), ""
    if not all(one.told for one in seen):
        return None, (
            f", because backward ran {len(seen)} times before the step, and an unchanged loop "
            f"cannot tell whether each loss was divided. {CALLS['backward']}"
        )
    return LazyFloat(lambda: torch.stack([loss.float().reshape(()) for loss in losses]).mean()), ""
