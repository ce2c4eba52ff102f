"""The probes of a loop: attached to its model while they are enabled and the loop runs."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hookline.dispatch import HookManager
from hookline.loop.event_context import EventContext

if TYPE_CHECKING:
    from hookline.probes.sync import ProbeSync

__all__ = ["LoopProbes"]


class LoopProbes:
    """Attaches and detaches the probes among a loop's hooks, if there are any."""

    def __init__(self, hooks: HookManager, context: EventContext) -> None:
        self._hooks, self._context = hooks, context
        self._sync: ProbeSync | None = None  # most loops have no probes

    @property
    def is_waiting(self) -> bool:
        """Whether an edit waits for the end of the step to be attached or detached."""
        return self._sync is not None and self._sync.waiting

    def sync(self, *, is_attached: bool, within_step: bool) -> None:
        """Attach the probes that are enabled to the model, and detach the others.

        Within a step, edits wait: a backward may follow.
        """
        if self._sync is None and self._hooks.of_kind("probe"):
            from hookline.probes.sync import ProbeSync

            self._sync = ProbeSync(self._hooks, self._context.model, ProbeView(self._context))
        if self._sync is not None:
            self._sync.sync(is_running=is_attached, within_step=within_step)

    def end_step(self) -> None:
        """Warn about modules that were not called in the first step of a probe."""
        if self._sync is not None:
            self._sync.end_step()

    def silence(self) -> None:
        """Hide all calls from the probes for good: this process was forked."""
        if self._sync is not None:
            self._sync.silence()

    def close(self) -> None:
        """Remove all hooks of the probes from the model; what they have captured stays."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None


class ProbeView:
    """The context as probes read it: what the loop has not provided is None."""

    def __init__(self, context: EventContext) -> None:
        self._context = context

    trainer = property(attrgetter("_context.trainer"))
    step = property(attrgetter("_context.step"))
    step_in_progress = property(attrgetter("_context.step_in_progress"))
    shows_generation = property(attrgetter("_context.shows_generation"))

    @property
    def epoch(self) -> Any:
        return self._context.known("epoch")

    @property
    def evaluating(self) -> bool:
        context = self._context
        return context.evaluating or (context.generating and not context.shows_generation)
