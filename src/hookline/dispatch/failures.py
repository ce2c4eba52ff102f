"""Handling of failing hooks: training continues without them, unless it depends on them."""

from __future__ import annotations

import bdb
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hookline.context import read_lazy
from hookline.dispatch.entry import Entry
from hookline.dispatch.settings import HookSettings
from hookline.errors import HookFailedError, HooklineError, NotProvidedError, RandomNumberError
from hookline.masking import mask_text

log = logging.getLogger("hookline")


class HookFailure(NamedTuple):
    """A failure of a hook, by name, with the number of its failures so far."""

    hook: str
    event: str  # or the method, if that is no event
    error: Exception
    failures: int


class FailureHandler:
    """Logs and counts failures, and disables hooks that fail repeatedly.

    It calls `on_failure` for each failure, and then `on_disabled` with a hook that it disables.
    """

    def __init__(self, settings: HookSettings, on_disabled: Callable[[Entry], None]) -> None:
        self._settings = settings
        self._on_disabled = on_disabled
        self.on_failure: Callable[[HookFailure], None] | None = None

    def handle_failure(
        self, entry: Entry, method: str, call: int, error: Exception
    ) -> Exception | None:
        """Log and count a hook's exception, and disable the hook after repeated failures.

        Return the error to raise after the other hooks were called, if training depends on the
        hook. Without isolation, the exception is raised at once. Consecutive values of `call`
        are failures in a row.
        """
        if not self._settings.isolate or isinstance(error, bdb.BdbQuit):
            raise error
        is_draw = isinstance(error, RandomNumberError) and not entry.critical
        if isinstance(error, HookFailedError) and not is_draw:
            return error  # raised by an event that this hook fired: still fatal
        label = entry.bindings[method].label if method in entry.bindings else method
        streak = entry.count_failure(method, call)
        entry.last_error = mask_text(str(error) if is_draw else f"{type(error).__name__}: {error}")
        self._report(entry, method, error)
        if is_draw:
            self._disable(entry, str(error), logging.WARNING)
            return None
        is_explained = entry.critical and isinstance(error, HooklineError)  # it will be raised
        if self._settings.log_errors and not is_explained:
            log.error(
                "The hook '%s' failed in %s (%s)%s%s",
                entry.name,
                label,
                entry.last_error,
                ", and training depends on it." if entry.critical else "; training continues.",
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
        if streak >= self._settings.max_failures and entry.enabled:
            self._disable(entry, f"It failed {streak} times in a row.")
        return None

    def handle_missing_args(
        self, entries: Iterable[Entry], event: str, context: object, *, raise_error: bool
    ) -> Exception | None:
        """Disable the hooks that require an argument which the event context does not have.

        Return the error to raise, if training depends on one of them. With `raise_error`, or
        without isolation, raise at once and disable none.
        """
        errors = _find_missing_args(entries, event, context)
        if raise_error or not self._settings.isolate:
            raise NotProvidedError(
                *(
                    f"{entry.name} ({entry.bindings[event].label}): {error}"
                    for entry, error in errors.items()
                )
            )
        fatal: Exception | None = None
        for entry, error in errors.items():
            entry.failures += 1
            entry.last_error = str(error)
            self._report(entry, event, error)
            if entry.critical and fatal is None:
                fatal = HookFailedError(
                    f"Training depends on the hook '{entry.name}', but the loop does not provide "
                    f"an argument that it asks for. {error}"
                )
                fatal.__cause__ = error
            self._disable(entry, str(error))
        return fatal

    def _report(self, entry: Entry, event: str, error: Exception) -> None:
        if self.on_failure is not None:
            self.on_failure(HookFailure(entry.name, event, error, entry.failures))

    def _disable(self, entry: Entry, reason: str, level: int = logging.ERROR) -> None:
        entry.status = "failed"
        self._on_disabled(entry)
        log.log(
            level,
            "The hook '%s' is DISABLED and not called any more. %s enable_hook('%s') enables it "
            "again.",
            entry.name,
            reason,
            entry.name,
            extra={"own_rank": True},  # other processes may not have failed
        )


def _find_missing_args(
    entries: Iterable[Entry], event: str, context: object
) -> dict[Entry, NotProvidedError]:
    """Return the hooks that lack an argument, each with the error for the first one."""
    errors: dict[Entry, NotProvidedError] = {}
    for entry in entries:
        for argument in entry.required_arguments(event):
            try:
                read_lazy(getattr(context, argument))
            except NotProvidedError as error:
                errors[entry] = error
                break
            except Exception:  # it cannot be computed: a failure of the hook, when it is called
                continue
    return errors


def _hint(error: Exception) -> str:
    if isinstance(error, TypeError) and "LazyFloat" in str(error):
        return " This number is read from the device on first use: write float(…) around it."
    return ""
