"""Which hook is being called: found from the frames of this thread, so that calls cost nothing."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from types import FrameType

from hookline.dispatch.compiler import DISPATCHER_FILE
from hookline.dispatch.entry import Entry
from hookline.dispatch.guarded_calls import guard_calls

__all__ = ["find_calling_hook", "find_limited_hook", "is_firing"]

_CALL = re.compile(r" +(?:try: )?hook(\d+)\(")
_GUARDED = guard_calls.__code__.co_consts  # has the code of the function that it returns


def _calling_entries() -> Iterator[Entry | None]:
    """Yield the hooks that are being called on this thread, the innermost first.

    None stands for an event that is being fired, while no hook of it is called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _GUARDED:
            yield frame.f_locals["entry"]
        elif frame.f_code.co_filename.startswith(DISPATCHER_FILE):
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            call = _CALL.match(line)
            dispatcher = frame.f_globals["handle_failure"].__self__
            yield None if call is None else dispatcher.entries[int(call[1])]
        frame = frame.f_back


def find_calling_hook() -> str | None:
    """Return the name of the hook that is being called on this thread; None if there is none."""
    entry = next(_calling_entries(), None)
    return None if entry is None else entry.name


def find_limited_hook() -> Entry | None:
    """Return a hook that is being called on this thread, and not in all processes; or None.

    What needs all processes, such as a collective, can then raise an error instead of waiting for
    processes that will not come.
    """
    return next((one for one in _calling_entries() if one and one.ranks != "all"), None)


def is_firing(context: object) -> bool:
    """Return whether an event of this context is being fired on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(DISPATCHER_FILE):
            return frame.f_locals.get("context") is context
        frame = frame.f_back
    return False
