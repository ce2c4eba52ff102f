"""Text for people: on a terminal folded at words and coloured, elsewhere as it is."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

__all__ = ["room", "show"]

_LAST_COLUMN = re.compile(r".*\s\s(?=\S)")


def room() -> int | None:
    """Return how many letters fit into a line of the terminal; None where there is none."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else None


def show(text: str, styles: Mapping[str, str] | None = None) -> None:
    """Print a text.

    Args:
        text: lines; what is too long is folded under the last column.
        styles: patterns of what stands out, and how.
    """
    from rich.console import Console
    from rich.text import Text

    width = room()
    if width is not None:
        text = "\n".join(_folded(line, width) for line in text.split("\n"))
    console = Console(highlight=False)
    if width is None or console.no_color:
        print(text)
        return
    styled = Text(text)
    for pattern, style in (styles or {}).items():
        styled.highlight_regex(pattern, style)
    console.print(styled, soft_wrap=True)


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    column = _LAST_COLUMN.match(line)
    under = column.end() if column else len(line) - len(line.lstrip())
    if under > width * 2 // 3:
        under = 4
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * under,
        break_long_words=False,
        break_on_hyphens=False,
    )
