"""One writer per run: a lease that a process holds while it writes a run.

The lease is the file `lease-<number>.json` with the highest number in the run's folder. It names
its holder, and a thread of the holder changes its heartbeat every few seconds. To take over a lease
that was released, or whose holder is dead, a process creates the file with the next number, which
only one process can do, also on network file systems. Whoever finds that a higher number exists has
lost the lease. Files are only ever written by the process that created them; the last one stays, as
released, so that numbers are never used twice.

A holder on the same machine is checked by its process. Elsewhere it counts as dead when its
heartbeat has not changed for `STALE_SECONDS`, on the clock of the process that waits: clocks of
several machines are not compared.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookline.errors import RunError
from hookline.files import describe_kind, file_limits, open_handle, parse_json, read_regular_file
from hookline.interrupts import AllowedInterrupts
from hookline.runs.environment import describe_process, is_process_alive
from hookline.runs.jsonl_file import WriteRefusedError
from hookline.runs.manifest import utc_now

log = logging.getLogger("hookline")

STALE_SECONDS = 60.0
"""How long a heartbeat does not change before its holder counts as dead."""

HEARTBEAT_SECONDS = 10.0
"""How often a holder changes its heartbeat."""

_NAME = re.compile(r"lease-([1-9][0-9]*)\.json")
_SIZE = 1024  # always the same, so that one write replaces the contents


class Lease:
    """The right of this process to write a run; renewed by a thread until `release`.

    Attributes:
        lost: Why this process may not write the run any more; None while it may.
        on_lost: Called once when the lease is lost, also from the thread that renews it.
    """

    def __init__(self, folder: Path, number: int, handle: int, holder: dict[str, Any]) -> None:
        self.lost: str | None = None
        self.on_lost: Callable[[], None] | None = None
        self._path = _lease_file(folder, number)
        self._number = number
        self._handle: int | None = handle
        self._holder = holder
        self._beats = 0
        self._pid = os.getpid()
        self._confirmed = time.monotonic()
        self._lock = threading.RLock()  # a signal handler may release the lease
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hookline-lease", daemon=True)

    @classmethod
    def acquire(cls, folder: Path) -> Lease:
        """Take the lease of a run; wait for a holder that may be dead, raise if it is not."""
        while True:
            with AllowedInterrupts():  # it may wait for a minute
                number = _wait_until_free(folder)
            lease = cls._create(folder, number + 1)
            if lease is not None:
                try:
                    _remove_older(folder, number + 1)
                    lease._thread.start()  # noqa: SLF001 - of its class
                    return lease  # noqa: TRY300 - Ctrl-C may come here, too
                except BaseException:  # Ctrl-C, or too many threads
                    lease.release()
                    raise

    @classmethod
    def _create(cls, folder: Path, number: int) -> Lease | None:
        """Create the lease with this number; return None if another process was faster."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            handle = open_handle(_lease_file(folder, number), flags, 0o600)
        except FileExistsError:
            return None
        holder = {"token": secrets.token_hex(8), "since": utc_now(), **describe_process()}
        lease = cls(folder, number, handle, holder)
        is_newest = False
        try:
            lease._write()
            is_newest = find_lease(folder) == number
        finally:
            if not is_newest:
                lease._discard()
        return lease if is_newest else None

    @property
    def is_own(self) -> bool:
        """Whether this process holds the lease; a process that was forked from it does not."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raise if this process may not write the run any more; the log says so once.

        It looks at the lease only if the thread has not done so for a while: the process may have
        been suspended.
        """
        if not self.is_own:
            raise WriteRefusedError("a forked process does not write the run of its parent")
        if self.lost is None and time.monotonic() - self._confirmed > STALE_SECONDS / 2:
            with suppress(OSError):
                self._confirm()
        if self.lost is not None:
            raise WriteRefusedError(self.lost)

    def release(self) -> None:
        """Let other processes write the run. A forked process does not release it."""
        if not self.is_own:
            return
        self._released.set()
        with self._lock, suppress(OSError):
            if self._handle is not None and self.lost is None:
                self._write(released=True)
        self._close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)  # a disk that does not respond may keep it

    def _renew(self) -> None:
        """Change the heartbeat until the lease is released or lost; runs in a thread."""
        has_warned = False
        while not self._released.wait(HEARTBEAT_SECONDS) and self.lost is None:
            try:
                self._confirm()
                with self._lock:
                    if self._handle is not None:
                        self._beats += 1
                        self._write()
            except OSError as error:
                if not has_warned and not self._path.parent.is_dir():
                    log.warning(
                        "%s was deleted or moved. Training continues, but is not recorded any "
                        "more.",
                        self._path.parent,
                    )
                elif not has_warned:
                    log.warning(
                        "%s cannot be written: %s. After %.0f s, another process may take over the "
                        "run.",
                        *(self._path, error, STALE_SECONDS),
                    )
                has_warned = True

    def _confirm(self) -> None:
        """Find out whether this process still holds the lease."""
        with self._lock:
            if self._handle is None or self.lost is not None:
                return
            folder = self._path.parent
            if find_lease(folder) != self._number:
                self.lost = _describe_loss(folder)
                log.error("%s It stops writing to %s.", self.lost, folder)
                if self.on_lost is not None:
                    self.on_lost()
            self._confirmed = time.monotonic()

    def _write(self, *, released: bool = False) -> None:
        assert self._handle is not None
        contents = {**self._holder, "heartbeat": self._beats, "released": released}
        data = json.dumps(contents, ensure_ascii=False).encode().ljust(_SIZE - 1) + b"\n"
        if os.pwrite(self._handle, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        os.fsync(self._handle)

    def _close(self) -> None:
        with self._lock:
            if self._handle is not None:
                with suppress(OSError):
                    os.close(self._handle)
                self._handle = None

    def _discard(self) -> None:
        """Remove a file that was created, but is not the lease."""
        self._path.unlink(missing_ok=True)
        self._close()


def find_lease(folder: Path) -> int:
    """Return the number of a run's lease; 0 if there is none."""
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return max((int(found[1]) for found in names if found is not None), default=0)


def read_lease(folder: Path, number: int) -> dict[str, Any]:
    """Return the contents of a lease; empty if they cannot be read or are not valid."""
    with suppress(OSError, ValueError):
        data = read_regular_file(_lease_file(folder, number), file_limits.manifest_bytes)
        contents = parse_json(data)
        return contents if isinstance(contents, dict) else {}
    return {}


def is_silent(folder: Path) -> bool:
    """Return whether the holder of a run's lease has ended, or been silent for minutes: a guess."""
    try:
        number = find_lease(folder)
        modified = _modified(_lease_file(folder, number))
    except OSError:
        return False
    is_old = modified is not None and time.time() - modified / 1e9 > 5 * STALE_SECONDS
    return is_old or bool(read_lease(folder, number).get("released"))


def _lease_file(folder: Path, number: int) -> Path:
    return folder / f"lease-{number}.json"


def _remove_older(folder: Path, number: int) -> None:
    for path in folder.glob("lease-*.json"):
        found = _NAME.fullmatch(path.name)
        if found is not None and int(found[1]) < number:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _wait_until_free(folder: Path) -> int:
    """Wait until nobody holds the lease, and return its number; 0 if there is none."""
    number, seen, unchanged, has_warned = -1, None, 0.0, False
    looked = time.monotonic()
    while True:
        newest = find_lease(folder)
        if (kind := describe_kind(_lease_file(folder, newest))) is not None:
            file = _lease_file(folder, newest).name
            raise RunError(f"The run {folder} cannot be written: {file} is {kind}. Remove it.")
        holder = read_lease(folder, newest)
        if newest == 0 or holder.get("released") or is_process_alive(holder) is False:
            return newest
        state = (holder, _modified(_lease_file(folder, newest)))
        now = time.monotonic()
        if is_process_alive(holder) or (newest == number and state != seen):
            raise RunError(_describe_holder(folder, holder))
        if newest == number:
            # A process that was itself suspended has not watched for all of that time.
            unchanged += min(now - looked, STALE_SECONDS / 10)
            if unchanged >= STALE_SECONDS:
                return newest
            if not has_warned and unchanged >= STALE_SECONDS / 60:
                has_warned = True
                log.warning(
                    "%s Waiting up to %.0f s to see whether that process is alive.",
                    *(_describe_holder(folder, holder), STALE_SECONDS),
                )
        else:
            number, unchanged = newest, 0.0
        seen, looked = state, now
        time.sleep(STALE_SECONDS / 120)


def _modified(file: Path) -> int | None:
    """Return when a file was changed: also another user's, whose contents cannot be read."""
    try:
        return file.lstat().st_mtime_ns
    except OSError:
        return None


def _describe_holder(folder: Path, holder: Mapping[str, Any]) -> str:
    if is_process_alive(holder) and holder.get("pid") == os.getpid():
        return (
            f"The run {folder} is already open for writing in this process. Close it first: "
            "run.close()."
        )
    who = _describe_process(holder) if holder else "another process"
    return (
        f"The run {folder} is being written by {who}. Only one process can write a run: stop that "
        "process, or start a new run."
    )


def _describe_process(holder: Mapping[str, Any]) -> str:
    since = str(holder.get("since"))[:19].replace("T", " ")
    return f"process {holder.get('pid')} on host {holder.get('host')}, since {since} UTC"


def _describe_loss(folder: Path) -> str:
    holder = read_lease(folder, find_lease(folder))
    if not holder:
        return "The lease file of this process was removed."
    return (
        f"The run was taken over by {_describe_process(holder)}, because this process did not "
        f"respond for more than {STALE_SECONDS:.0f} s."
    )
