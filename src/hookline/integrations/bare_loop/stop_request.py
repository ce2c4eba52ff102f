"""A request to stop a bare loop, which only the loop itself can follow."""

from __future__ import annotations

import logging
from typing import Literal

from hookline.errors import StopTraining
from hookline.integrations.bare_loop.loop_checks import CALLS
from hookline.loop.control_requests import ControlRequests

log = logging.getLogger("hookline")


class StopRequest:
    """Whether the loop is asked to stop, and whether it does; options as for `attach`.

    Attributes:
        needs_agreement: whether the loop stops only when all processes know.
        has_been_read: whether the loop has read that it should stop.
        is_ignored: whether the loop went on.
    """

    def __init__(self, requests: ControlRequests, on_stop: Literal["warn", "raise"]) -> None:
        self._requests = requests
        self.needs_agreement = False
        self.has_been_read = self.is_ignored = False
        self._is_agreed = False
        self._on_stop = on_stop
        self._step = 0
        self._steps_since = -1  # steps that ended after that one, skipped ones included

    @property
    def reason(self) -> str | None:
        """Why, if a hook of this process asks; the first reason."""
        return self._requests.stop_reason

    @property
    def is_active(self) -> bool:
        """Whether the loop should stop."""
        return self.reason is not None and (self._is_agreed or not self.needs_agreement)

    def make(self, reason: str, step: int) -> None:
        """Ask the loop to stop in this step."""
        if self.reason is None:
            self._step, self._steps_since = step, -1
        self._requests.stop(reason)

    def agree(self, step: int) -> None:
        """Stop: another process asks for it, or all processes know of this one's request."""
        if not self._is_agreed:
            self.make("another process asked for it", step)  # the first reason is kept
            self._is_agreed, self._step, self._steps_since = True, step, -1

    def withdraw(self) -> None:
        """Do not stop."""
        self._requests.stop_reason, self._is_agreed = None, False

    def check(self) -> None:
        """Warn, at the end of a step, about a loop that goes on; raise if the user chose so."""
        self._steps_since += 1
        steps = self._steps_since
        if self.has_been_read:
            return
        why = f" ({self.reason})" if self.reason else ""
        if self._on_stop == "raise":
            self.is_ignored = False  # it ends now
            raise StopTraining(f"Training was asked to stop in step {self._step}{why}.")
        if steps >= 1 and not self.is_ignored:
            self.is_ignored = True
            log.warning(
                "Training was asked to stop in step %d%s, but the loop goes on. %s Or end it where "
                "`session.should_stop` is True, or by an exception: `attach(…, on_stop='raise')`.",
                self._step,
                why,
                CALLS["batches"],
            )
