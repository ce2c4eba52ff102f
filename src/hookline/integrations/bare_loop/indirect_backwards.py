"""Backwards that do not pass through a call of the attached model.

A loop may call parts of the model only, its `forward` method, or functions with its parameters.
Such a backward is known by the gradients that it has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

import torch

from hookline.integrations.bare_loop.backward_watch import listen_to_backward
from hookline.integrations.bare_loop.clip_tracker import Versions, gradient_versions
from hookline.integrations.bare_loop.loss_tracker import LossTracker
from hookline.loop.model_watch import ModelWatch

__all__ = ["IndirectBackwards"]


class IndirectBackwards:
    """Calls back after each backward that has changed gradients, and that the model did not show.

    Args:
        model: shows the other backwards, and counts all.
        optimizers: have the gradients.
        losses: says whether graphs of losses are read.
        begins: called with the gradients as they were before backward, by optimizer.
        ends: called after that.

    Attributes:
        thread: the thread of the latest step; backwards of others are not those of this training.
    """

    def __init__(
        self,
        model: ModelWatch,
        optimizers: list[torch.optim.Optimizer],
        losses: LossTracker,
        begins: Callable[[list[Versions]], None],
        ends: Callable[[], None],
    ) -> None:
        self.thread = get_ident()
        self._model, self._optimizers, self._losses = model, optimizers, losses
        self._begins, self._ends = begins, ends

    def listen(self, on: bool) -> None:
        """Listen to calls of backward, or stop doing so."""
        listen_to_backward(self, on)

    @property
    def reads_graphs(self) -> bool:
        """Whether it must be found out by which number losses were divided."""
        return self._losses.reads_graphs

    def before_backward(self) -> tuple[int, list[Versions]] | None:
        """Return the number of backwards so far, and the gradients."""
        if get_ident() != self.thread:
            return None
        return self._model.backwards_seen, list(map(gradient_versions, self._optimizers))

    def after_backward(self, before: tuple[int, list[Versions]] | None) -> None:
        """Call back if this backward has changed gradients, and was not seen."""
        if before is None or before[0] != self._model.backwards_seen:
            return
        if before != self.before_backward():
            self._model.backwards_seen += 1
            self._begins(before[1])
            self._ends()
