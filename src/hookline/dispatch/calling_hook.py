"""Which hook is being called: found from the frames of this thread, so that calls cost nothing."""

from __future__ import annotations

import linecache
import re
import sys
from types import FrameType

from hookline.dispatch.compiler import DISPATCHER_FILE
from hookline.dispatch.guarded_calls import guard_calls

__all__ = ["find_calling_hook"]

_CALL = re.compile(r" +(?:try: )?hook(\d+)\(")
_GUARDED = guard_calls.__code__.co_consts  # has the code of the function that it returns


def find_calling_hook() -> str | None:
    """Return the name of the hook that is being called on this thread; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _GUARDED:
            return str(frame.f_locals["entry"].name)
        if frame.f_code.co_filename.startswith(DISPATCHER_FILE):
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            call = _CALL.match(line)
            dispatcher = frame.f_globals["handle_failure"].__self__
            return None if call is None else str(dispatcher.entries[int(call[1])].name)
        frame = frame.f_back
    return None
