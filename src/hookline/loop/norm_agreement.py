"""Agreement of all ranks on when the norm of sharded gradients is computed.

The norm of sharded gradients is a collective. A hook that asks for it may be called in one process
only, so the processes agree, between two steps, on the hooks of all of them that ask for it. In a
step in which one of these is due, all processes compute the norm when the event is fired.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hookline.dispatch import HookManager, Schedule
from hookline.loop.processes import OneProcess

__all__ = ["NormAgreement"]

log = logging.getLogger("hookline")

_EVENTS = ("on_gradient_clip", "on_step_end")
_ARGUMENTS = ("grad_norm", "ctx")


class NormAgreement:
    """The hooks of all processes that ask for the gradient norm."""

    def __init__(self, hooks: HookManager, processes: OneProcess) -> None:
        own = {event: hooks.schedules_of(event, _ARGUMENTS) for event in _EVENTS}
        self._schedules: list[Mapping[str, Schedule]] = [
            schedules for one in processes.gather(own) for schedules in one.values() if schedules
        ]
        self._has_warned = False

    def is_due(self, step: int, epoch: int | None) -> bool:
        """Return whether a hook of any process asks for the norm in this step."""
        return any(
            schedule.is_due(name, step, schedule.from_epoch if epoch is None else epoch)
            for schedules in self._schedules
            for name, schedule in schedules.items()
        )

    def warn_of_late_hook(self) -> None:
        """Warn that a hook asks for a norm that was not computed, because it came too late."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "A hook that was added or enabled within a step asks for the gradient norm. The "
                "gradients are sharded, so all processes have to compute it together, and they do "
                "from the next step on. In this step the hook gets NaN."
            )
