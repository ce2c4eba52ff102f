"""Every error that Hookline raises.

    HooklineError
    ├── RegistrationError          a hook that cannot be registered as it is written
    │   ├── NotAHookError          (also a TypeError) something that is no hook
    │   ├── SignatureError         an unknown event or parameter, a coroutine, event and alias
    │   └── OrderError             `before=` and `after=` that cannot both hold
    ├── NameTakenError             (also a ValueError) a hook's name that is in use
    ├── UnknownHookError           (also a KeyError) no hook of that name
    ├── UnknownEventError          (also a ValueError) no event, or no argument, of that name
    ├── NotSuppliedError           a hook asks for what this loop has not supplied
    ├── LoopError                  a loop that cannot be followed without guessing
    ├── ConfigError                (also a ValueError) a configuration that does not fit
    ├── TrainingError              what the trainer was given cannot be trained
    ├── CheckpointError            a checkpoint that cannot be saved, found or loaded
    ├── RunError                   a run's folder that cannot be made, opened or used this way
    ├── ProbeError                 a probe that cannot be attached, or may not do what it does
    ├── HookFailedError            a hook that training depends on has failed
    │   └── ObserverError          a hook that only observes has changed training
    └── HookStateError             a hook that could not take its saved state back

Messages say what was seen, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "HookFailedError",
    "HookStateError",
    "HooklineError",
    "LoopError",
    "NameTakenError",
    "NotAHookError",
    "NotSuppliedError",
    "ObserverError",
    "OrderError",
    "ProbeError",
    "RegistrationError",
    "RunError",
    "SignatureError",
    "TrainingError",
    "UnknownEventError",
    "UnknownHookError",
]


class HooklineError(Exception):
    """The root: catch this to catch whatever Hookline itself raises."""


class RegistrationError(HooklineError):
    """A hook cannot be registered as it is written."""


class NotAHookError(RegistrationError, TypeError):
    """Something was registered that does not inherit from `hookline.Hook`."""


class SignatureError(RegistrationError):
    """A method or one of its parameters matches nothing that the event has."""


class OrderError(RegistrationError):
    """The wished order of hooks contradicts itself."""


class NameTakenError(HooklineError, ValueError):
    """Another hook of this run has the name."""


class UnknownHookError(HooklineError, KeyError):
    """No hook has this name."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class UnknownEventError(HooklineError, ValueError):
    """An event, or an argument of an event, was named that does not exist."""


class NotSuppliedError(HooklineError):
    """A hook asks for something that the loop has not supplied."""


class LoopError(HooklineError):
    """The loop does something that cannot be followed without guessing."""


class ConfigError(HooklineError, ValueError):
    """A configuration does not fit: the message names each field, and the nearest one."""


class TrainingError(HooklineError):
    """Model, optimizers, data or loss cannot be trained as they are."""


class CheckpointError(HooklineError):
    """A checkpoint cannot be saved, found or loaded; the message names the file and the way out."""


class RunError(HooklineError):
    """A run's folder cannot be made, opened or used this way."""


class HookFailedError(HooklineError):
    """A hook failed that training depends on; the hook's own error is the cause."""


class ObserverError(HookFailedError):
    """A hook that only observes has changed what it observes, or drawn random numbers."""


class ProbeError(HooklineError):
    """A probe cannot be attached, or may not do what it does."""


class HookStateError(HooklineError):
    """A hook could not take back the state that was saved for it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean …?" when a known word is close, else nothing."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Return names as they stand in a message: quoted, with commas; "none" when empty."""
    return ", ".join(f"'{name}'" for name in names) or "none"
