"""Printing text: wrapped and coloured on a terminal, unchanged elsewhere."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

__all__ = ["show", "terminal_width"]

_LAST_COLUMN = re.compile(r".*\s\s(?=\S)")


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; None without a terminal."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else None


def show(text: str, styles: Mapping[str, str] | None = None) -> None:
    """Print a text.

    Args:
        text: lines; long lines are wrapped under their last column.
        styles: the style of each pattern to highlight.
    """
    from rich.console import Console
    from rich.text import Text

    width = terminal_width()
    if width is not None:
        text = "\n".join(_wrap_line(line, width) for line in text.split("\n"))
    console = Console(highlight=False)
    if width is None or console.no_color:
        print(text)
        return
    styled = Text(text)
    for pattern, style in (styles or {}).items():
        styled.highlight_regex(pattern, style)
    console.print(styled, soft_wrap=True)


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    column = _LAST_COLUMN.match(line)
    indent = column.end() if column else len(line) - len(line.lstrip())
    if indent > width * 2 // 3:
        indent = 4
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
