"""ConfigTree: a configuration with the file and line of each key, and errors that name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hookline.errors import ConfigError
from hookline.masking import mask_text, masked_repr

__all__ = [
    "COMMAND_LINE",
    "ConfigTree",
    "FileError",
    "Key",
    "Problem",
    "describe_result",
    "format_key",
    "format_value",
]

Key = tuple[str | int, ...]
"""The path to a value: `("hooks", 0, "every")`."""

COMMAND_LINE = "command line"
_MAX_LENGTH = 80


@dataclass(frozen=True)
class Problem:
    """One mistake in a config file.

    Attributes:
        file: the file, as it was given; or "command line".
        line: the line, counted from 1; None if unknown.
        key: the key, with dots; "" for the whole file.
        text: what was found, what was expected, and what to do.
    """

    file: str
    line: int | None
    key: str
    text: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key}: {self.text}" if self.key else f"{place}: {self.text}"


class FileError(ConfigError):
    """A config file is not valid; `problems` has every mistake that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        masked = (replace(problem, text=mask_text(problem.text)) for problem in problems)
        self.problems = tuple(dict.fromkeys(masked))
        lines = [str(problem) for problem in self.problems]
        head = f"{len(lines)} problems:\n  " if len(lines) > 1 else ""
        super().__init__(head + "\n  ".join(lines))


@dataclass
class ConfigTree:
    """A configuration of a main file, and the file and line (if known) of each of its keys."""

    file: str
    values: dict[str, Any]
    places: dict[Key, tuple[str, int | None]]

    def place(self, key: Key) -> tuple[str, int | None]:
        """Return the file and line of a key; for a missing key, those of its nearest parent."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.places:
                return self.places[key[:length]]
        return self.file, None

    def problem(self, key: Key, text: str) -> Problem:
        """Return a problem of this key, with its place."""
        file, line = self.place(key)
        return Problem(file, line, format_key(key), text)

    def forget_places(self, key: Key) -> None:
        """Remove the places of a key and of all keys below it."""
        for known in [one for one in self.places if one[: len(key)] == key]:
            del self.places[known]


def format_key(key: Key) -> str:
    """Return a key as it is written on the command line: `hooks.0.every`."""
    return ".".join(str(part) for part in key)


def describe_result(result: object) -> str:
    """Return what a function returned, for a message that says what was expected."""
    if isinstance(result, type):
        return f"the class {result.__name__}, not an instance"
    return f"a {type(result).__name__}"


def format_value(value: object, key: Key = ()) -> str:
    """Return the repr of a key's value for a message, shortened if it is long; no secrets."""
    try:
        text = masked_repr(value, *key)
    except Exception as error:  # an integer with too many digits, or a user's own __repr__
        text = f"<{type(value).__name__}, whose repr fails: {type(error).__name__}>"
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"
