"""ConfigTree: a configuration with the file and line of each key, and errors that name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hookline.errors import ConfigError
from hookline.masking import mask_text, masked_repr
from hookline.printable import message_lines

Key = tuple[str | int, ...]
"""The path to a value: `("hooks", 0, "every")`."""

COMMAND_LINE = "command line"
MAX_PROBLEMS = 20
"""The number of mistakes that are reported at once."""

_MAX_VALUE = 80  # characters of a value or name in a message


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
        text = " ".join(map(str.strip, self.text.split("\n")))  # each problem is one line
        return f"{place}: {self.key}: {text}" if self.key else f"{place}: {text}"


class FileError(ConfigError):
    """A config file is not valid.

    Attributes:
        problems: the mistakes that were found, up to 20, with secrets masked.
        count: the number of all mistakes, as far as it is known.
    """

    def __init__(self, problems: Iterable[Problem], count: int = 0) -> None:
        found = tuple(dict.fromkeys(problems))
        shown = (replace(problem, text=mask_text(problem.text)) for problem in found[:MAX_PROBLEMS])
        self.problems = tuple(dict.fromkeys(shown))
        self.count = max(count, len(found))
        head = ""
        if self.count > len(found[:MAX_PROBLEMS]):
            head = f"{self.count:,} problems, of which the first {MAX_PROBLEMS} are:"
        elif len(self.problems) > 1:
            head = f"{len(self.problems)} problems:"
        super().__init__(message_lines(*([head] if head else []), *map(str, self.problems)))


class ProblemList(list[Problem]):
    """Problems that are collected to be reported together.

    As soon as there are as many as are reported, no others are looked for: `append` raises.
    """

    def append(self, problem: Problem) -> None:
        """Add a problem; raise a `FileError` if the list is full."""
        super().append(problem)
        if len(self) >= MAX_PROBLEMS:
            raise FileError(self)

    def extend(self, problems: Iterable[Problem]) -> None:
        """Add problems, as `append` does."""
        for problem in problems:
            self.append(problem)

    def raise_any(self) -> None:
        """Raise a `FileError` if there are problems."""
        if self:
            raise FileError(self)


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

    def forget_places(self, key: Key, value: Any) -> None:
        """Remove the places of a key with this value, and of all keys below it."""
        self.places.pop(key, None)
        if isinstance(value, dict | list):
            for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                self.forget_places((*key, name), inner)


def format_key(key: Key) -> str:
    """Return a key as it is written on the command line: `hooks.0.every`."""
    return ".".join(shorten(str(part), _MAX_VALUE) for part in key)


def format_value(value: object, key: Key = ()) -> str:
    """Return the repr of a key's value for a message, shortened if it is long; no secrets."""
    try:
        text = masked_repr(value, *key)
    except Exception as error:  # an integer with too many digits, or a user's own __repr__
        text = f"<{type(value).__name__}, whose repr fails: {type(error).__name__}>"
    return shorten(text, _MAX_VALUE)


def shorten(text: str, limit: int) -> str:
    """Return a text that is cut after a number of characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
