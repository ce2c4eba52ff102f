"""The states of hooks, by name, for checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.dispatch.entry import Entry
from hookline.dispatch.failures import Failures
from hookline.errors import HookStateError

__all__ = ["StateReport", "load_states", "save_states"]

log = logging.getLogger("hookline")


@dataclass(frozen=True)
class StateReport:
    """What did not fit when states were loaded: hooks without one, and states without a hook."""

    missing: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()


def save_states(entries: Sequence[Entry], failures: Failures) -> dict[str, dict[str, Any]]:
    """Return what the hooks want saved. One that fails is left out, unless training needs it."""
    states: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not entry.saves:
            continue
        try:
            states[entry.name] = entry.hook.state_dict()
        except Exception as error:  # isolated like every call of a hook
            fatal = failures.failed(entry, "state_dict", 0, error)
            if fatal is not None:
                raise fatal from error
    return states


def load_states(entries: Sequence[Entry], states: Mapping[str, Mapping[str, Any]]) -> StateReport:
    """Give hooks their states back, and report what did not fit."""
    if not isinstance(states, Mapping):
        raise HookStateError(
            "Expected what state_dict() returned, a mapping from hook names to states, "
            f"not a {type(states).__name__}."
        )
    keeps = {entry.name: entry for entry in entries if entry.saves}
    report = StateReport(
        tuple(name for name in keeps if name not in states),
        tuple(name for name in states if name not in keeps),
    )
    for name, entry in keeps.items():
        if name not in states:
            continue
        try:
            entry.hook.load_state_dict(states[name])
        except Exception as error:
            raise HookStateError(
                f"The hook '{name}' ({type(entry.hook).__name__}) could not take its saved state "
                f"back: {type(error).__name__}: {error}"
            ) from error
    if report.missing:
        log.warning("No saved state for these hooks, they start afresh: %s", report.missing)
    if report.orphaned:
        log.warning("Saved states that no hook takes (removed or renamed?): %s", report.orphaned)
    return report
