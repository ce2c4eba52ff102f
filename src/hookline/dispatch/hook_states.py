"""Save and load the states of hooks, by name, for checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.arguments import show_value
from hookline.dispatch.entry import Entry
from hookline.dispatch.failures import FailureHandler
from hookline.errors import HookStateError

log = logging.getLogger("hookline")


@dataclass(frozen=True)
class StateReport:
    """The mismatches found when states were loaded.

    `missing` are hooks without a saved state, `orphaned` are saved states without a hook.
    """

    missing: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()


def save_states(entries: Sequence[Entry], failures: FailureHandler) -> dict[str, dict[str, Any]]:
    """Return the states of the hooks that have one, by name.

    A hook whose `state_dict` fails is omitted, or stops training if it is critical.
    """
    states: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not entry.has_state:
            continue
        try:
            states[entry.name] = entry.hook.state_dict()
        except Exception as error:  # isolated like every call of a hook
            fatal = failures.handle_failure(entry, "state_dict", 0, error)
            if fatal is not None:
                raise fatal from error
    return states


def load_states(entries: Sequence[Entry], states: Mapping[str, Mapping[str, Any]]) -> StateReport:
    """Load the hooks' states, and return the mismatches.

    Raises:
        HookStateError: a hook's `load_state_dict` failed.
    """
    if not isinstance(states, Mapping):
        raise HookStateError(
            "Expected what state_dict() returned, a mapping from hook names to states, "
            f"not a {type(states).__name__}."
        )
    try:
        states = dict(states.items())
    except Exception as error:
        raise HookStateError(
            f"The states of hooks, a {type(states).__name__}, cannot be read ({show_value(error)})."
        ) from error
    stateful = {entry.name: entry for entry in entries if entry.has_state}
    report = StateReport(
        tuple(name for name in stateful if name not in states),
        tuple(name for name in states if name not in stateful),
    )
    for name, entry in stateful.items():
        if name not in states:
            continue
        try:
            entry.hook.load_state_dict(states[name])
        except Exception as error:
            raise HookStateError(
                f"The hook '{name}' ({type(entry.hook).__name__}) could not load its saved state: "
                f"{type(error).__name__}: {error}"
            ) from error
    if report.missing:
        log.warning("No saved state for these hooks, they start anew: %s", report.missing)
    if report.orphaned:
        log.warning("Saved states without a hook (removed or renamed?): %s", report.orphaned)
    return report
