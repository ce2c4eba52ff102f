"""One writer per run: a lock on `writer.lock` in the run's folder, held while a process writes it.

The operating system releases the lock when the process ends, however it ends, also on network file
systems (some take a minute to notice that a machine is gone).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

from hookline.errors import RunError
from hookline.files import open_handle
from hookline.interrupts import AllowedInterrupts
from hookline.runs.environment import is_process_alive
from hookline.runs.jsonl_file import WriteRefusedError
from hookline.runs.manifest import inspect_run_manifest, last_write_time

log = logging.getLogger("hookline")

LOCK = "writer.lock"
WAIT_SECONDS = 90.0
"""How long a lock is waited for whose holder may be dead: a worker or a file server may keep it."""

_SILENT_SECONDS = 300.0  # without locks: then a run is not written any more

_held: WeakSet[RunLock] = WeakSet()


class RunLock:
    """The right of this process to write a run, until `release` or the end of the process."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        self._pid = os.getpid()
        _watch_forks()
        _held.add(self)

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Take the lock of a run; raise if another process, or this one, writes it."""
        try:
            handle = open_handle(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise RunError(f"The run {folder} cannot be written: {error}.") from error
        try:
            with AllowedInterrupts():
                _lock(handle, folder)
            return cls(handle)
        except BaseException:
            os.close(handle)
            raise

    @property
    def is_own(self) -> bool:
        """Whether this process holds the lock; a process that was forked from it does not."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise if this process may not write the run."""
        if not self.is_own:
            raise WriteRefusedError("a forked process does not write the run of its parent")

    def release(self) -> None:
        """Let other processes write the run. A forked process does not release it."""
        if self.is_own:
            self.close()

    def close(self) -> None:
        """Close this process's handle: a lock is released when all processes have closed it."""
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None


@cache
def _watch_forks() -> None:
    """Close the copies of forked processes, which would keep a lock when their parent is killed."""

    def close_copies() -> None:
        for lock in _held:
            lock.close()

    os.register_at_fork(after_in_child=close_copies)


def is_locked(folder: Path) -> bool:
    """Return whether a process on any machine writes a run."""
    try:
        handle = open_handle(folder / LOCK)
    except OSError:
        return False
    try:
        _flock(handle, exclusive=False)
    except BlockingIOError:
        return True
    except (OSError, ImportError):  # not supported by the file system, or by Windows
        return _was_written_recently(folder)
    finally:
        os.close(handle)
    return False


def _lock(handle: int, folder: Path) -> None:
    """Lock a file, waiting for a holder that may be dead; raise if it is alive."""
    begun = time.monotonic()
    has_warned = False
    while not _try_lock(handle, folder):
        holder = _read_holder(folder)
        waited = time.monotonic() - begun
        if is_process_alive(holder) or waited > WAIT_SECONDS:
            raise RunError(_describe_holder(folder, holder))
        if waited > 1 and not has_warned:
            has_warned = True
            shown = _describe_holder(folder, holder)
            log.warning("%s Waiting up to %.0f s for its end.", shown, WAIT_SECONDS)
        time.sleep(0.1)


def _try_lock(handle: int, folder: Path) -> bool:
    try:
        _flock(handle, exclusive=True)
    except BlockingIOError:
        return False
    except (OSError, ImportError) as error:  # not supported by the file system, or by Windows
        holder = _read_holder(folder)
        if holder and is_process_alive(holder) is not False and _was_written_recently(folder):
            raise RunError(_describe_holder(folder, holder)) from error
        log.warning("%s cannot be locked (%s). Start no second process for it.", folder, error)
    return True


def _flock(handle: int, *, exclusive: bool) -> None:
    import fcntl  # Windows has none, where runs can be read

    fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def _was_written_recently(folder: Path) -> bool:
    return time.time() - (last_write_time(folder) or 0.0) < _SILENT_SECONDS


def _read_holder(folder: Path) -> Mapping[str, Any]:
    """Return the attempt that has not ended; empty if its process has not written that yet."""
    newest = (inspect_run_manifest(folder)[0].get("attempts") or [{}])[-1]
    return newest if newest.get("ended") is None else {}


def _describe_holder(folder: Path, holder: Mapping[str, Any]) -> str:
    if not holder:
        who = "another process"
    elif holder.get("pid") == os.getpid() and is_process_alive(holder):
        return (
            f"The run {folder} is already open for writing in this process. Close it first: "
            "run.close()."
        )
    else:
        since = str(holder.get("started"))[:19].replace("T", " ")
        who = f"process {holder.get('pid')} on host {holder.get('host')}, since {since} UTC"
    return (
        f"The run {folder} is being written by {who}. Only one process can write a run: stop that "
        "process, or start a new run."
    )
