"""Output streams that tolerate a closed pipe and characters that cannot be encoded."""

from __future__ import annotations

import io
import sys
from typing import Any

__all__ = ["prepare_streams"]


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
            text = io.TextIOWrapper(
                file,
                stream.encoding,
                "replace",
                line_buffering=stream.line_buffering or stream.write_through,  # -u
            )
            setattr(sys, name, text)
