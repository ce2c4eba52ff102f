"""What is wrong with a training file: all of it at once, each with its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hookline.errors import ConfigError

__all__ = ["COMMAND_LINE", "FileError", "Key", "Problem", "dotted", "shown"]

Key = tuple[str | int, ...]
"""Where a value stands: `("hooks", 0, "every")`."""

COMMAND_LINE = "command line"
_LONGEST = 80


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        file: the file, as it was named; or "command line".
        line: the line, from 1; None where it is not known.
        key: the key, with dots; "" for the file as a whole.
        text: what was seen, what was expected, what to do.
    """

    file: str
    line: int | None
    key: str
    text: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key}: {self.text}" if self.key else f"{place}: {self.text}"


class FileError(ConfigError):
    """A training file does not fit.

    Attributes:
        problems: all that is wrong.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(one) for one in self.problems]
        head = f"{len(lines)} problems:\n  " if len(lines) > 1 else ""
        super().__init__(head + "\n  ".join(lines))


def dotted(key: Key) -> str:
    """Return a key as it is written on the command line: `hooks.0.every`."""
    return ".".join(str(part) for part in key)


def shown(value: object) -> str:
    """Return a value as it stands in a message, cut to a sane length."""
    try:
        text = repr(value)
    except Exception as error:  # a number with too many digits, a stranger's object
        text = f"<{type(value).__name__}, whose repr fails: {type(error).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
