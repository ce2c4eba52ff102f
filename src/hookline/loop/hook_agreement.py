"""Agreement of all processes on which hooks are enabled."""

from __future__ import annotations

from hookline.dispatch import HookManager
from hookline.errors import LoopError
from hookline.loop.processes import OneProcess

__all__ = ["HookAgreement"]


class HookAgreement:
    """Applies toggles of hooks in one process to all processes, between two steps."""

    def __init__(self, hooks: HookManager, processes: OneProcess) -> None:
        self._hooks = hooks
        self._processes = processes
        self._agreed = self._status()

    def apply_toggles(self) -> None:
        """Enable and disable hooks as they were in any process since the last agreement.

        All processes have to call this.

        Raises:
            LoopError: an update was added or removed in some processes only.
        """
        self._check_updates()
        now, before = self._status(), self._agreed
        own = {name: on for name, on in now.items() if before.get(name, on) != on}
        agreed = dict(now)
        for changes in reversed(self._processes.gather(own)):  # rank 0's count most
            agreed |= {name: on for name, on in changes.items() if name in agreed}
        for name, on in agreed.items():
            if on != now[name]:
                (self._hooks.enable_hook if on else self._hooks.disable_hook)(name)
        self._agreed = agreed

    def _check_updates(self) -> None:
        """Raise, in all processes, if they have different updates: their weights would differ."""
        own = [info.name for info in self._hooks.describe() if info.kind == "update"]
        gathered = self._processes.gather(own)
        other = next((r for r, names in enumerate(gathered) if names != gathered[0]), None)
        if other is not None:
            raise LoopError(
                f"Updates were added or removed in some processes only: rank 0 has {gathered[0]}, "
                f"and rank {other} {gathered[other]}. Add and remove them in all processes, in the "
                "same step: otherwise each would train a model of its own."
            )

    def _status(self) -> dict[str, bool]:
        return {info.name: info.status == "enabled" for info in self._hooks.describe()}
