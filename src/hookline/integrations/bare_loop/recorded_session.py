"""A bare loop that is recorded: what it tells more than one that is not.

These replace `BareLoopEventContext` and `StepWatch` when `attach` is given a folder for runs, so
that a loop without one does no more than before.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from hookline.integrations.bare_loop.averages import Averages
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext
from hookline.integrations.bare_loop.step_watch import StepWatch
from hookline.loop.event_context import device_of
from hookline.loop.model_watch import ModelWatch
from hookline.runs.jsonable import to_jsonable
from hookline.runs.recorder import Recorder
from hookline.runs.run import Run

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session import Session

__all__ = ["RecordedMoment", "RecordedSteps", "SessionRecord"]

log = logging.getLogger("hookline")


class RecordedMoment(BareLoopEventContext):
    """The arguments of events, with the run."""

    @property
    def run(self) -> Any:
        """The run; None on ranks that do not write it."""
        return self.trainer.run


class RecordedSteps(StepWatch):
    """Watches the loss of each step for the record, whether or not a hook asks for it."""

    session: Session

    def hooks_changed(self) -> None:
        """Watch what the hooks need now, and always backward, where the loss is seen."""
        if type(self._model) is ModelWatch:  # made just now, and not in use yet
            self._model = _BackwardWatch(
                self.context.model,
                self._before_forward,
                self._after_forward,
                self._backward_begins,
                self._backward_ends,
            )
        super().hooks_changed()
        self._losses.wanted = True

    def _end_step(self, *, skipped: bool) -> None:
        before = self.context.latest_loss
        super()._end_step(skipped=skipped)
        loss = self.context.latest_loss
        self.session.end_recorded_step(loss if loss is not before else None)


class _BackwardWatch(ModelWatch):
    def watch(self, *, calls: bool, backward: bool) -> None:
        # Hooks on the call of a model that was compiled in place would be compiled with it.
        in_place = getattr(self.model, "_compiled_call_impl", None) is not None
        super().watch(calls=calls, backward=backward or not in_place)


class SessionRecord(Recorder):
    """The record of a session: what is logged in a step is written when the step ends."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._step = Averages()
        self._told = False

    def start(self, session: Session, config: Any) -> None:
        """Begin a run, on one rank only."""
        if _rank() != 0:
            return
        given = to_jsonable(config)
        named = given if isinstance(given, dict) else {} if given is None else {"config": given}
        self.begin(
            config=named,
            seed=named.get("seed"),
            hooks=session.hooks.describe(),
            device=device_of(session.model),
            step=None if isinstance(self._root, Run) else 0,  # `session.resumed` will tell
        )

    def logged(self, name: str, value: Any) -> None:
        """Keep a number for the end of the step."""
        if self.run is not None:
            self._step.add(name, value)

    def end_step(self, step: int, epoch: int | None, loss: Any) -> None:
        """Write the loss of a step, and what was logged in it."""
        if self.run is None:
            return
        values = self._step.means("train/")
        if loss is not None:
            values["train/loss"] = loss  # the one that backward was called on, if there is a doubt
        elif "train/loss" not in values and not self._told:
            self._told = True
            log.warning(
                "The run's record has no train/loss: which loss the steps have cannot be seen in "
                "this loop. Let the session run backward (`session.backward(loss)`), or log it: "
                "`session.log('loss', loss)`."
            )
        self.metrics(step, epoch, values)
        self._step = Averages()

    def end_epoch(self, step: int, epoch: int, means: dict[str, Any]) -> None:
        """Write the means of an epoch, apart from the values of its steps."""
        self.metrics(step, epoch, {f"{name}_epoch": value for name, value in means.items()})


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or 0)  # torchrun's, before the group is made
