"""What happens in a run, for its event log: each event with the step that training has reached."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hookline.dispatch import HookInfo
from hookline.dispatch.calling_hook import find_calling_hook
from hookline.dispatch.failures import HookFailure
from hookline.masking import mask_text
from hookline.runs.run import Run

__all__ = ["EventRecorder", "format_traceback"]

_ALWAYS_RECORDED = 20  # failures of a hook, or skipped steps; then the 100th, 1000th, …
_MAX_TRACEBACK = 20_000  # characters


class EventRecorder:
    """Records what happens in a run, if there is one."""

    run: Run | None = None  # None also after the run has ended

    def __init__(self) -> None:
        self._hook_statuses: dict[str, str] = {}  # as they were written last
        self._counts = Counter[str]()
        self.skipped_steps = 0

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        if self.run is not None:
            self.run.event(kind, **fields)

    def hooks_changed(self, step: int, hooks: Sequence[HookInfo]) -> None:
        """Record the status of the hooks that were added, removed or toggled."""
        if self.run is None:
            return
        now = {info.name: str(info.status) for info in hooks}
        removed = dict.fromkeys(self._hook_statuses.keys() - now, "removed")
        known = self._hook_statuses
        changed = {name: s for name, s in now.items() if known.get(name) != s} | removed
        if changed:
            self.run.event("hooks", step=step, hooks=changed, by=find_calling_hook())
        self._hook_statuses = now

    def hook_failed(self, step: int, failure: HookFailure) -> None:
        """Record a failure of a hook, with its traceback."""
        if self.run is not None and self._is_recorded(f"hook {failure.hook}"):
            self.run.event(
                "hook_failed",
                step=step,
                hook=failure.hook,
                event=failure.event,
                error=mask_text(f"{type(failure.error).__name__}: {failure.error}"),
                traceback=format_traceback(failure.error),
                failures=failure.failures,
            )

    def step_skipped(self, step: int, reason: str, optimizer_idx: int) -> None:
        """Record that an optimizer has not stepped."""
        if self.run is None:
            return
        self.skipped_steps += 1
        if self._is_recorded("skipped"):
            count = self.skipped_steps
            fields = {"reason": reason, "optimizer_idx": optimizer_idx, "count": count}
            self.run.event("step_skipped", step=step, **fields)

    def stop_requested(self, step: int, reason: str | None) -> None:
        """Record that a hook, or the program, asks training to stop."""
        if self.run is not None:
            self.run.event("stop", step=step, reason=reason, by=find_calling_hook())

    def _is_recorded(self, key: str) -> bool:
        """Count an event; return whether it is recorded: a few of them, if there are very many."""
        self._counts[key] = count = self._counts[key] + 1
        return count <= _ALWAYS_RECORDED or str(count).strip("0") == "1"


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an error as text, with secrets masked; of a long one, the end."""
    return mask_text("".join(traceback.format_exception(error)))[-_MAX_TRACEBACK:]
