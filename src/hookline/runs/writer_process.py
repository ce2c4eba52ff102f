"""Which process writes a run, and whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["is_alive", "process_facts"]


def process_facts() -> dict[str, Any]:
    """Return what identifies this process, also when its number is given to another."""
    return {
        "pid": os.getpid(),
        "pid_started": _started(os.getpid()),
        "pid_namespace": _namespace(),
    }


def is_alive(part: Mapping[str, Any]) -> bool | None:
    """Whether the process of a part of a run lives; None where that cannot be seen from here.

    It can be seen on the same host, and within the same container.
    """
    pid = part.get("pid")
    if type(pid) is not int or part.get("host") != socket.gethostname() or os.name != "posix":
        return None
    if part.get("pid_namespace") != _namespace():
        return None
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    started = _started(pid)
    return started is None or part.get("pid_started") in (None, started)


def _namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """When a process started, in Linux's ticks since the machine did; -1 for a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        state, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
        return -1 if state in "ZX" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None
