"""Calls that are running: what other libraries do not pass to their callbacks is found in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["calling_frames", "find_frame"]


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def find_frame(function: Any) -> FrameType | None:
    """Return the frame of a function that is running in this thread; None if it is not."""
    return next((each for each in calling_frames() if each.f_code is function.__code__), None)
