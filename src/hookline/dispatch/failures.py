"""What happens when a hook fails: training goes on without it, unless it depends on it."""

from __future__ import annotations

import bdb
import logging
from collections.abc import Callable, Iterable

from hookline.dispatch.entry import Entry
from hookline.dispatch.hook_settings import HookSettings
from hookline.errors import HookFailedError, HooklineError, NotSuppliedError

__all__ = ["Failures"]

log = logging.getLogger("hookline")


class Failures:
    """Logs, counts, isolates and quarantines; `quarantined` is told who is not called any more."""

    def __init__(self, settings: HookSettings, quarantined: Callable[[Entry], None]) -> None:
        self._settings = settings
        self._quarantined = quarantined

    def failed(self, entry: Entry, where: str, call: int, error: Exception) -> Exception | None:
        """Treat a hook's exception; return what is to be raised once the others had their turn."""
        if not self._settings.isolate or isinstance(error, bdb.BdbQuit):
            raise error  # debugging: as it is, at once
        if isinstance(error, HookFailedError):
            return error  # of an event that this hook fired: no less fatal for that
        label = entry.bindings[where].label if where in entry.bindings else where
        streak = entry.count_failure(where, call)
        entry.last_error = f"{type(error).__name__}: {error}"
        told = entry.critical and isinstance(error, HooklineError)  # raised, it says everything
        if self._settings.log_errors and not told:
            log.error(
                "The hook '%s' failed in %s (%s)%s%s",
                entry.name,
                label,
                entry.last_error,
                ", and training depends on it." if entry.critical else "; training goes on.",
                _hint(error),
                exc_info=error,
            )
        if entry.critical:
            fatal = HookFailedError(
                f"The hook '{entry.name}' failed in {label}, and training depends on it: "
                f"{entry.last_error}"
            )
            fatal.__cause__ = error
            return fatal
        if streak >= self._settings.max_failures and entry.active:
            self._quarantine(entry, f"It failed {streak} times in a row.")
        return None

    def misses(
        self, entries: Iterable[Entry], event: str, src: object, *, refuse: bool
    ) -> Exception | None:
        """Treat hooks that ask for what the source does not have.

        They are quarantined; what is returned is to be raised, for one that training depends on.
        `refuse` raises at once instead.
        """
        without = _misses(entries, event, src)
        if refuse or not self._settings.isolate:
            raise NotSuppliedError(
                "\n".join(
                    f"{entry.name} ({entry.bindings[event].label}): {miss}"
                    for entry, miss in without.items()
                )
            )
        fatal: Exception | None = None
        for entry, miss in without.items():
            entry.failures += 1
            entry.last_error = str(miss)
            if entry.critical and fatal is None:
                fatal = HookFailedError(
                    f"Training depends on the hook '{entry.name}', which was not supplied with "
                    f"what it asks for. {miss}"
                )
                fatal.__cause__ = miss
            self._quarantine(entry, str(miss))
        return fatal

    def _quarantine(self, entry: Entry, why: str) -> None:
        entry.quarantined = True
        self._quarantined(entry)
        log.error(
            "The hook '%s' is QUARANTINED and not called any more. %s enable_hook('%s') lets it "
            "back.",
            entry.name,
            why,
            entry.name,
        )


def _misses(entries: Iterable[Entry], event: str, src: object) -> dict[Entry, NotSuppliedError]:
    """The hooks that ask for what the source does not have, each with the first such thing."""
    misses = {entry: _first_miss(entry, event, src) for entry in entries}
    return {entry: miss for entry, miss in misses.items() if miss is not None}


def _first_miss(entry: Entry, event: str, src: object) -> NotSuppliedError | None:
    """The error for the first thing that this hook asks for and the source does not have."""
    for argument in entry.asks(event):
        try:
            getattr(src, argument)
        except NotSuppliedError as miss:
            return miss
    return None


def _hint(error: Exception) -> str:
    if isinstance(error, TypeError) and "LazyFloat" in str(error):
        return " A number is read from the device when looked at: write float(…) around it."
    return ""
