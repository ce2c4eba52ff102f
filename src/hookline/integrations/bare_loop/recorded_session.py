"""Writes the run of a session."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from hookline.loop.event_context import device_of
from hookline.loop.means import Means
from hookline.runs.jsonable import to_jsonable
from hookline.runs.recorder import Recorder
from hookline.runs.run import Run

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.attached_loop import AttachedLoop

__all__ = ["SessionRecorder"]

log = logging.getLogger("hookline")


class SessionRecorder(Recorder):
    """Writes the run of a session: values that are logged in a step are written at its end."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._step_means = Means()
        self._warned = False
        self._last_step = 0

    def start(self, session: AttachedLoop, config: Any) -> None:
        """Start a run, on the first rank only."""
        if _rank() != 0:
            return
        given = to_jsonable(config)
        named = given if isinstance(given, dict) else {} if given is None else {"config": given}
        self.begin(
            config=named,
            seed=named.get("seed"),
            hooks=session.hooks.describe(),
            device=device_of(session.model),
            step=None if isinstance(self._root, Run) else 0,  # `session.resumed` sets it
            loop=session,
        )

    def add_to_step(self, name: str, value: Any) -> None:
        """Keep a number for the end of the step."""
        if self.run is not None:
            self._step_means.add(f"train/{name}", value)

    def end_step(self, step: int, epoch: int | None, loss: Any) -> None:
        """Write the loss of a step, and the means of what was logged in it."""
        if self.run is None:
            return
        values = self._step_means.means()
        if loss is None and not values and step == self._last_step:
            return  # at the end, with nothing left
        self._last_step = step
        if loss is not None:
            values["train/loss"] = loss  # that of backward has precedence over a logged one
        elif "train/loss" not in values and not self._warned:
            self._warned = True
            log.warning(
                "The run has no train/loss: the loss of the steps cannot be seen in this loop. "
                "Let the session run backward (`session.backward(loss)`), or log it: "
                "`session.log('loss', loss)`."
            )
        self.metrics(step, epoch, values)
        self._step_means = Means()


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or 0)  # as torchrun sets it, before there is a process group
