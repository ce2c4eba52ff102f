"""The losses of batches and steps in a bare loop.

The loop may give them (`session.backward(loss)`). Otherwise the loss is the tensor that backward
was called on. Under gradient accumulation most loops divide it by the number of backwards in a
step, which is known when the step ends; a loss that was divided by this number is multiplied by it.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from hookline.context import NO_LOSS, LazyFloat
from hookline.integrations.bare_loop.backward_watch import running_backward
from hookline.integrations.bare_loop.requirements import Requirements
from hookline.loop.event_context import EventContext

__all__ = ["LossTracker"]

log = logging.getLogger("hookline")


@dataclass
class BackwardLoss:
    """The loss of one backward.

    Attributes:
        loss: the tensor, unscaled; None if it is not known.
        given: whether the loop gave its own loss (`session.backward`).
        divisor: the constant that it was divided by last; None without one.
        compiled: whether it comes out of a compiled function, which hides a division.
        host_divisor: the number that it was divided by, where a host says so.
        turn: how many times optimizers have stepped before it, in its step.
    """

    loss: torch.Tensor | None
    given: bool = False
    divisor: float | None = None
    compiled: bool = False
    host_divisor: float | None = None
    turn: int = 0


class LossTracker:
    """The losses of the step and of the batch in progress.

    Args:
        context: gets the losses.
        requirements: gets why there is no loss.
        scaler: what multiplies the loss before backward.
        divided: whether the loop divides its losses by the number of batches in a step; None to
            find out.

    Attributes:
        wanted: whether the losses of an unchanged loop are read.
        turns: how many times optimizers have stepped, while the step goes on with others.
        divisor: the number that each loss is divided by from now on, where a host says so.
    """

    def __init__(
        self,
        context: EventContext,
        requirements: Requirements,
        scaler: torch.amp.GradScaler | None,
        divided: bool | None = None,
    ) -> None:
        self.wanted = False
        self.turns = 0
        self.divisor: float | None = None
        self._context, self._requirements = context, requirements
        self._scaler = scaler
        self._divided = divided
        self._step: list[BackwardLoss] = []
        self._batch: list[BackwardLoss] = []
        self._first: list[BackwardLoss] = []
        self._is_given = self._has_reported = False
        self._group = 0  # the number of backwards that a whole step has divided by
        self._is_known = False  # whether a step with several backwards has ended
        self._counts: dict[int, int] = {}  # backwards of the step that ends, by turn

    @property
    def reads_graphs(self) -> bool:
        """Whether it must be found out by which number losses were divided."""
        return self.wanted and self._divided is not False and self.divisor is None

    def expect_divisor(self, count: int) -> None:
        """Undo a division by this number also in steps with fewer batches, and in the first."""
        self._group = max(self._group, count)

    def set_loss(self, loss: torch.Tensor | None) -> None:
        """Set the loss that the loop runs backward on; None after it."""
        self._is_given = loss is not None
        if loss is not None and self.wanted:
            self._add(BackwardLoss(loss.detach(), given=True), self._has_gradients())

    def add_running(self, had_gradients: bool | None = None) -> None:
        """Add the loss of the backward that runs.

        Args:
            had_gradients: whether there were gradients before this backward; None if it has not
                changed them yet.
        """
        if self._is_given:
            return
        if had_gradients is None:
            had_gradients = self._has_gradients()
        running = running_backward()
        if running is None or running.loss is None:
            self._add(BackwardLoss(None), had_gradients)
            return
        scaled = self._scaler is not None and self._scaler.is_enabled()
        graph = running.graph
        divisor = None if graph is None else graph.divisor(is_scaled=scaled)
        compiled = graph is not None and divisor is None and graph.compiled(is_scaled=scaled)
        loss = running.loss.detach()
        if self._scaler is not None and scaled:
            loss = loss / self._scaler.scale(torch.ones_like(loss))  # on the device; nothing waits
        self._add(BackwardLoss(loss, divisor=divisor, compiled=compiled), had_gradients)

    def _has_gradients(self) -> bool:
        return any(
            parameter.grad is not None
            for optimizer in self._context.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _add(self, seen: BackwardLoss, had_gradients: bool) -> None:
        # Gradients were dropped since the last backward, if there was one: it had no step.
        if not had_gradients and not self.turns:
            self._step.clear()
        seen.host_divisor, seen.turn = self.divisor, self.turns
        self._step.append(seen)
        batch = self._context.known("current_batch")
        if batch is not None and not batch.ended:  # else nobody asks for it, or clears it
            self._batch.append(seen)

    def keep_first(self) -> None:
        """Keep the loss of a closure's first evaluation as that of the step."""
        self._first = list(self._step)

    def batch_begins(self) -> None:
        """Forget the losses of the batch before."""
        self._batch.clear()

    def set_batch_loss(self) -> LazyFloat | None:
        """Set the context's loss to that of the batch that ends; return it."""
        self._set(self._batch, self._counts)
        loss: LazyFloat | None = self._context.known("loss")
        return loss

    def set_step_loss(self) -> None:
        """Set the context's loss to that of the step."""
        losses = self._first or self._step
        self._set(losses, _count_turns(losses))

    def end_step(self) -> None:
        """Learn whether losses are divided, and add the step's loss to the means."""
        losses = self._first or self._step
        self._counts = _count_turns(losses)
        for turn in self._counts:
            self._learn([seen for seen in losses if seen.turn == turn])
        own = self._set(losses, self._counts)
        if own:
            self._context.latest_loss = self._context.loss
            for loss in own:
                self._context.means.add("train/loss", loss)

    def forget(self) -> None:
        """Forget the losses of the step."""
        self._step.clear()
        self._first = []
        self._counts = {}
        self.turns = 0

    # -- losses that the loop has divided ---------------------------------------------------------

    def _learn(self, losses: list[BackwardLoss]) -> None:
        """Find out from the backwards of a whole turn whether losses are divided; say so once."""
        count = len(losses)
        if self._divided:
            self._group = max(self._group, count)
        if self._divided is not None or self.divisor is not None:
            return
        if count < 2 or any(seen.given for seen in losses):
            return
        is_divided = any(_is(seen.divisor, count) for seen in losses)
        if is_divided:
            self._group = max(self._group, count)
        if not self._is_known:
            what = f"divides the loss by {count}," if is_divided else "does not divide the loss by"
            log.info(
                "Backward runs %d times in a step, and the loop %s the number of backwards: `loss` "
                "is that of the batches. If this is wrong: attach(…, loss_divided=%s).",
                count,
                what,
                not is_divided,
            )
        self._is_known = True

    def _divisor(self, seen: BackwardLoss, count: int) -> float | None:
        """Return what this loss was divided by for accumulation; None if that is not known.

        Args:
            seen: the loss.
            count: the number of backwards in its turn; 0 while the step is in progress.
        """
        if seen.host_divisor is not None:
            return seen.host_divisor
        if seen.given or self._divided is False:
            return 1.0
        if self._divided:
            return seen.divisor or max(self._group, count) or None
        if seen.compiled:
            return 1.0 if count == 1 else None
        is_guess = count == 0 and not self._is_known and _is_whole(seen.divisor)
        if is_guess or _is(seen.divisor, count) or _is(seen.divisor, self._group):
            return seen.divisor
        return 1.0

    def _set(self, losses: list[BackwardLoss], counts: dict[int, int]) -> list[torch.Tensor]:
        """Set the context's loss to the mean of these losses, undivided; return them."""
        context, absent = self._context, self._requirements
        context.provide("loss", None)
        absent.why_no_loss = ""
        own: list[torch.Tensor] = []
        for seen in losses:
            divisor = self._divisor(seen, counts.get(seen.turn, 0))
            if seen.loss is not None and divisor is not None:
                own.append(seen.loss if divisor == 1.0 else seen.loss * divisor)
            elif seen.loss is not None:
                absent.why_no_loss = (
                    ", because it comes out of a compiled function, and it cannot be seen whether "
                    "it was divided for gradient accumulation. Say so: "
                    "`attach(…, loss_divided=True)` or `False`."
                )
        if not losses and self.wanted:
            self._report_no_backward()
            context.loss = NO_LOSS
            return []
        if len(own) < len(losses) or not losses:
            absent.why_no_loss = absent.why_no_loss or (
                f", because backward was not called on a single number. {absent.calls['backward']}"
            )
            return []
        if len(own) == 1:
            context.loss = LazyFloat(own[0])
        else:
            context.loss = LazyFloat(
                lambda: torch.stack([loss.float().reshape(()) for loss in own]).mean()
            )
        return own

    def _report_no_backward(self) -> None:
        """Say once that batches without backward have no loss."""
        if not self._has_reported:
            self._has_reported = True
            log.info(
                "No backward has run in a batch or step: hooks get `loss` as nan for it, and it is "
                "left out of means and of the record."
            )


def _count_turns(losses: list[BackwardLoss]) -> dict[int, int]:
    """Return the number of backwards in each turn: a loss is divided among those of its turn."""
    counts: dict[int, int] = {}
    for seen in losses:
        counts[seen.turn] = counts.get(seen.turn, 0) + 1
    return counts


def _is(divisor: float | None, count: int) -> bool:
    """Return whether the divisor is this number, more than one."""
    return divisor is not None and count > 1 and math.isclose(divisor, count, rel_tol=1e-4)


def _is_whole(divisor: float | None) -> bool:
    return divisor is not None and _is(divisor, round(divisor))
