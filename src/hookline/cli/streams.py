"""Where the command line prints: a pipe may be closed, a terminal may lack a letter."""

from __future__ import annotations

import io
import sys
from typing import Any

__all__ = ["prepare_streams"]


class _UntilClosed(io.FileIO):
    """A file whose reader may go: what is written after that is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def prepare_streams() -> None:
    """Let `hookline train … | head` end like any other, and show "?" for letters that lack."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="replace")
        if not stream.isatty():
            stream.flush()
            file = io.BufferedWriter(_UntilClosed(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(
                file,
                stream.encoding,
                "replace",
                line_buffering=stream.line_buffering or stream.write_through,  # -u
            )
            setattr(sys, name, text)
