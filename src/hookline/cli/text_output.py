"""Printing: text wrapped and coloured on a terminal, JSON, and streams that tolerate any reader."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from hookline.printable import escape_controls, printable, printable_message
from hookline.text_tables import cell_width

_LAST_COLUMN = re.compile(r".*\s\s(?=\S)")


def is_main_process() -> bool:
    """Return whether this is the first of the processes that torchrun has started, or the only one.

    The others print no results. Each has its own messages about its own errors.
    """
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; None without a terminal."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else None


def print_line(text: object, stream: TextIO | None = None) -> None:
    """Print one line at once, with line feeds of names escaped; on stdout in rank 0 only."""
    print_text(printable_message(text), stream)


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print a text at once, with control characters escaped; on stdout in rank 0 only."""
    if stream is None and not is_main_process():
        return
    print(escape_controls(text), file=stream, flush=True)


def show(text: str, styles: Mapping[str, str] | None = None) -> None:
    """Print a text, on a terminal with long lines wrapped and each pattern in its style.

    Control characters are escaped.
    """
    if not is_main_process():
        return
    from rich.console import Console
    from rich.text import Text

    text, width = escape_controls(text), terminal_width()
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


def show_lines(lines: Iterable[str]) -> None:
    """Print lines as `show` does; line feeds in each of them are escaped."""
    show("\n".join(map(printable_message, lines)))


def _wrap_line(line: str, width: int) -> str:
    """Return a line that continues under its last column, or indented: never like a new line."""
    if cell_width(line) <= width:
        return line
    column = _LAST_COLUMN.match(line)
    indent = cell_width(column[0]) if column else len(line) - len(line.lstrip())
    margin = " " * (max(indent, 2) if indent <= width * 2 // 3 else 4)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=margin,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_json(value: Any) -> None:
    """Print a value as JSON, with secrets masked and control characters as JSON escapes."""
    if not is_main_process():
        return
    from hookline.masking import mask_secrets
    from hookline.runs.jsonable import to_jsonable

    shown = mask_secrets(to_jsonable(value), by_name=False)
    text = json.dumps(shown, indent=1, ensure_ascii=False)
    print(escape_controls(text, escape=lambda char: json.dumps(char)[1:-1]))


@contextmanager
def progress_bar() -> Generator[Callable[[str, int, int], None]]:
    """Yield a function that shows a label, what is done, and the total as a bar on stderr.

    It does nothing if stderr is not a terminal.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("")

        def update(label: str, done: int, total: int) -> None:
            description = escape(printable(label, 60))
            bar.update(task, description=description, completed=done, total=total)

        yield update


class _PipeFile(io.FileIO):
    """A file that drops everything written after its reader has closed the pipe."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def prepare_streams() -> None:
    """Make `hookline train … | head` end normally, and print "?" for unknown characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="replace")
        if not stream.isatty():
            stream.flush()
            file = io.BufferedWriter(_PipeFile(stream.fileno(), "w", closefd=False))
            line_buffering = stream.line_buffering or stream.write_through  # python -u
            text = io.TextIOWrapper(file, stream.encoding, "replace", line_buffering=line_buffering)
            setattr(sys, name, text)
