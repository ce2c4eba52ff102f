"""All errors that Hookline raises.

    HooklineError
    ├── RegistrationError          a hook cannot be registered
    │   ├── NotAHookError          (also a TypeError) an object is not a hook
    │   ├── SignatureError         unknown event or parameter, coroutine, event under two names
    │   └── OrderError             contradicting `before=` and `after=`
    ├── ArgumentError              (also a TypeError and ValueError) an argument is not valid
    ├── NameTakenError             (also a ValueError) a hook's name is in use
    ├── UnknownHookError           (also a KeyError) no hook has the name
    ├── UnknownMetricError         (also a KeyError) an event has no metric of the name
    ├── UnknownEventError          (also a ValueError) no event, or no argument, has the name
    ├── NotProvidedError           the loop does not provide what a hook asks for
    ├── LoopError                  a bare loop is ambiguous
    ├── StopTraining               a hook asked to stop, and a bare loop went on
    ├── ConfigError                (also a ValueError) invalid configuration
    ├── CollectiveError            not all processes take part in a collective
    ├── TrainingError              invalid model, optimizer, data or loss
    ├── CheckpointError            a checkpoint cannot be saved, found or loaded
    ├── RunError                   a run's folder cannot be created, opened or used
    ├── ProbeError                 a probe cannot be attached, or does what it is not allowed to
    ├── HookFailedError            a hook that training depends on has failed
    │   ├── HookConfigError        (also a ConfigError) a hook's options do not fit the model
    │   └── ObserverError          a hook that only observes has changed training
    │       └── RandomNumberError  it used a global generator, whose state was restored
    └── HookStateError             a hook could not load its saved state

Messages say what was found, what was expected and what to do. They may contain names from files
and from users: control characters are shown escaped, and long messages are cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from hookline.printable import MessageLines, printable_message, quote_lines

_MAX_NAMES = 30
_MAX_NAME = 100  # characters


class HooklineError(Exception):
    """The base class of all errors that Hookline raises; each argument is one message.

    A message is one line, in which line feeds of names are escaped, or made by `message_lines`.
    """

    def __str__(self) -> str:
        return MessageLines("\n".join(printable_message(message) for message in self.args))


class ArgumentError(HooklineError, TypeError, ValueError):
    """A value that was passed to a function or method is not valid; the message names both."""


class RegistrationError(HooklineError):
    """A hook cannot be registered."""


class NotAHookError(RegistrationError, TypeError):
    """The object to register is not an instance of `hookline.Hook`."""


class SignatureError(RegistrationError):
    """A method matches no event, or a parameter no argument of its event."""


class OrderError(RegistrationError):
    """The requested order of hooks contradicts itself."""


class NameTakenError(HooklineError, ValueError):
    """Another hook of the run has this name."""


class UnknownMetricError(HooklineError, KeyError):
    """An event's metrics have no such name."""


class UnknownHookError(HooklineError, KeyError):
    """No hook has this name."""


class UnknownEventError(HooklineError, ValueError):
    """No event, or no argument of the event, has this name."""


class NotProvidedError(HooklineError):
    """The loop does not provide something that a hook asks for."""


NotSuppliedError = NotProvidedError  # its name until 0.1


class LoopError(HooklineError):
    """A bare loop does something that cannot be interpreted without guessing."""


class StopTraining(HooklineError):  # noqa: N818 - a request, not a failure
    """A hook asked to stop, and the loop went on: `attach(…, on_stop="raise")` ends it."""


class ConfigError(HooklineError, ValueError):
    """The configuration is invalid; the message names each field, and the nearest valid one."""


class CollectiveError(HooklineError):
    """Not all processes take part in a collective, so the others would wait for ever."""


class TrainingError(HooklineError):
    """The model, the optimizers, the data or the loss cannot be used for training."""


class CheckpointError(HooklineError):
    """A checkpoint cannot be saved, found or loaded; the message names the file and what to do."""


class RunError(HooklineError):
    """A run's folder cannot be created, opened or used in this way."""


class HookFailedError(HooklineError):
    """A hook that training depends on failed; its own exception is the `__cause__`."""

    def __str__(self) -> str:
        return quote_lines(Exception.__str__(self))  # has the lines of the hook's exception


class HookConfigError(ConfigError, HookFailedError):
    """A hook's options do not fit the model, which is found when training starts."""


class ObserverError(HookFailedError):
    """A hook that only observes has changed what it observes, or consumed random numbers."""


class RandomNumberError(ObserverError):
    """A hook that only observes used a global random number generator, which was restored."""


class ProbeError(HooklineError):
    """A probe cannot be attached, or does something that it is not allowed to."""


class HookStateError(HooklineError):
    """A hook could not load its saved state."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean …?" with the most similar known word, or "" if none is similar."""
    short = [name for name in known if len(name) <= _MAX_NAME]  # comparing long ones is slow
    close = get_close_matches(word, short, n=1, cutoff=0.6) if len(word) <= _MAX_NAME else []
    return f" Did you mean '{close[0]}'?" if close else ""


def listed(names: Iterable[str], most: int = _MAX_NAMES) -> str:
    """Return names for a message: quoted and separated by commas, or "none"."""
    every = list(names)
    shown = [f"'{name:.{_MAX_NAME}}'" for name in map(str, every[:most])]
    more = len(every) - len(shown)
    return (", ".join(shown) or "none") + (f" and {more} more" if more else "")
