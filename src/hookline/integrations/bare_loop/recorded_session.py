"""Writes the run of a session."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.loop.event_context import device_of
from hookline.loop.means import Means
from hookline.loop.processes import is_main_process
from hookline.runs.recorder import Recorder
from hookline.runs.run import Run

if TYPE_CHECKING:
    from pathlib import Path

    from hookline.integrations.bare_loop.recorded_loop import RecordedLoop

__all__ = ["SessionRecorder"]

log = logging.getLogger("hookline")


class SessionRecorder(Recorder):
    """Writes the run of a session: values that are logged in a step are written at its end."""

    def __init__(self, root: Any, trackers: Any = None) -> None:
        super().__init__(root, trackers)
        self._step_means = Means()
        self._warned = False
        self._last_step = 0

    def start(self, session: RecordedLoop, config: Mapping[str, Any]) -> None:
        """Start a run, or continue that of a loaded checkpoint; on the first rank only."""
        if not is_main_process():
            return
        restored, state = session._restored or (None, {})
        position = state.get("run")
        self._step_means.load_state_dict(state.get("logged", {}))
        is_own = isinstance(self._root, Run)
        self.begin(
            config=config,
            seed=config.get("seed"),
            hooks=session.hooks.describe(),
            device=device_of(session.model),
            # `notify_checkpoint_loaded` may set it
            step=None if is_own and restored is None else session.step,
            resumed_run=None if restored is None else session._find_resumed_run(restored),
            restored=restored,
            position=position,
            loop=session,
        )
        if is_own and restored is not None:
            self.rewind(position or {"step": session.step})
        self.add_unreported(session._restored)

    def add_unreported(self, restored: tuple[Path, Mapping[str, Any]] | None) -> None:
        """Write the values that were kept for a mean over all processes at a checkpoint."""
        if self.sink is not None and restored is not None:
            for step, epoch, name, value in restored[1].get("unreported", ()):
                self.sink.log(step, epoch, name, value)

    def unwritten_values(self) -> dict[str, Any]:
        """Return what was logged since the last step was written, for a checkpoint."""
        return self._step_means.state_dict()

    def add_to_step(self, name: str, value: Any) -> None:
        """Keep a number for the end of the step."""
        if self.sink is not None:
            self._step_means.add(f"train/{name}", value)

    def end_step(self, step: int, epoch: int | None, loss: Any, *, keep_loss: bool = True) -> None:
        """Write the loss of a step, and the means of what was logged in it.

        With `keep_loss=False`, the loss is known, but written later.
        """
        if self.sink is None:
            return
        values = self._step_means.means()
        if loss is None and not values and step == self._last_step:
            return  # at the end, with nothing left
        self._last_step = step
        if loss is not None:
            self._warned = True  # a step without a loss is the exception then
            values["train/loss"] = loss  # that of backward has precedence over a logged one
            if not keep_loss:
                del values["train/loss"]
        elif "train/loss" not in values and not self._warned:
            self._warned = True
            log.warning(
                "The run has no train/loss: the loss of the steps cannot be seen in this loop. "
                "Let the session run backward (`session.backward(loss)`), or log it: "
                "`session.log('loss', loss)`."
            )
        self.metrics(step, epoch, values)
        self._step_means = Means()
