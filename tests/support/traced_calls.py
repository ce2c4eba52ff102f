"""Which files of Hookline call which, traced in a run: the tests of call paths compare them."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hookline
from hookline.dispatch.compiler import DISPATCHER_FILE

SOURCE = Path(hookline.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
DISPATCHERS = "dispatch/compiler.py"  # the file that stands for the functions it generates


class CallTrace:
    """Collects calls while one of the `parts` runs, or between `start` and `stop`, in each thread.

    Args:
        parts: functions that are traced, with all that they call.
        muted: functions that are not, with all that they call.
        ends: functions to which the ways of interest lead.

    Attributes:
        files: whose functions were called.
        calls: pairs of files of which the first calls the second, also through other libraries.
        ways: the files that were on the stack when one of the `ends` was called, or an event fired.
    """

    def __init__(
        self,
        *,
        parts: Collection[CodeType] = (),
        muted: Collection[CodeType] = (),
        ends: Collection[CodeType] = (),
    ) -> None:
        self.files, self.ways = set[str](), set[str]()
        self.calls = set[tuple[str, str]]()
        self._parts, self._muted, self._ends = parts, muted, ends
        self._local = threading.local()

    def start(self) -> None:
        """Trace the calls of this thread from now on."""
        self._local.depth = 1

    def stop(self) -> None:
        """Trace the calls of this thread no more."""
        self._local.depth = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take note of a call: a profile function, as `sys.setprofile` takes one."""
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in ("<module>", "__del__"):
            return
        depth, muted = getattr(self._local, "depth", 0), getattr(self._local, "muted", 0)
        change = 1 if event == "call" else -1
        self._local.depth = depth = depth + change * (code in self._parts)
        self._local.muted = muted = muted + change * (code in self._muted)
        file = _own_file(frame)
        if file is None or event == "return" or muted or not depth:
            return
        self.files.add(file)
        callers = list(_callers(frame))
        if callers and callers[0] != file:
            self.calls.add((callers[0], file))
        if code in self._ends or code.co_filename.startswith(DISPATCHER_FILE):
            self.ways.update(callers, {file})

    def calls_back(self, leaves: Collection[str], walk: Collection[str]) -> set[tuple[str, str]]:
        """Return the calls from leaves into the walk."""
        return {(caller, file) for caller, file in self.calls if caller in leaves and file in walk}


def _callers(frame: FrameType) -> Iterator[str]:
    """Yield the files of Hookline on the stack, the innermost first."""
    caller = frame.f_back
    while caller is not None:
        if (file := _own_file(caller)) is not None:
            yield file
        caller = caller.f_back


def _own_file(frame: FrameType) -> str | None:
    """Return the file of a function, relative to the package; None for another library's."""
    name = frame.f_code.co_filename
    if name.startswith(DISPATCHER_FILE):
        return DISPATCHERS
    return Path(name).relative_to(SOURCE).as_posix() if Path(name).is_relative_to(SOURCE) else None


@contextmanager
def traced(trace: CallTrace) -> Generator[CallTrace]:
    """Let a trace see all calls in the block."""
    before = sys.getprofile()
    gc.disable()  # what it would free does not belong to the path
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        gc.enable()


def files_in_contributing(section: str) -> set[str]:
    """Return the files that a call path in CONTRIBUTING.md names."""
    text = CONTRIBUTING.read_text(encoding="utf-8").split(f"### {section}\n")[1]
    return set(re.findall(r"`([\w/]+\.py)", re.split(r"\n##", text)[0]))
