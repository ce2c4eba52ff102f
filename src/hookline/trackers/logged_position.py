"""Up to where a tracker has the run's record: what it lacks is logged again after a crash."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from hookline.files.regular_files import open_handle, read_regular_file

__all__ = ["LoggedPosition"]

_DIGITS = 20  # always as many, so that one write replaces the contents


class LoggedPosition:
    """A position in `metrics.jsonl`, in bytes, kept in `trackers/<name>.txt` of the run's folder.

    It is only used in the tracker's thread. A file that cannot be written or read never fails: then
    values are logged twice.

    Args:
        folder: the run's folder; None: nothing is kept.
        name: the tracker's name.
        unsaved_seconds: how long the tool itself keeps values in memory, which are lost when the
            process is killed. A position is written when it is older than that.
    """

    def __init__(self, folder: Path | None, name: str, unsaved_seconds: float = 0.0) -> None:
        file = re.sub(r"[^\w.-]", "_", name) + ".txt"
        self._file = None if folder is None else folder / "trackers" / file
        self._unsaved_seconds = unsaved_seconds
        self._unsaved: deque[tuple[float, int]] = deque()  # times and positions
        self.value = self._read()

    def advance(self, position: int) -> None:
        """Note that the tool was given everything up to a position."""
        self.value = position
        now = time.monotonic()
        self._unsaved.append((now, position))
        saved: int | None = None
        while self._unsaved and now - self._unsaved[0][0] >= self._unsaved_seconds:
            saved = self._unsaved.popleft()[1]
        if saved is not None:
            self._write(saved)

    def rewind(self, position: int) -> None:
        """Note that the run's record ends at a position now, and that the tool has all of it."""
        self._unsaved.clear()
        self._write(min(self._read(), position))
        self.advance(position)

    def reset(self) -> None:
        """Note that the tool has nothing of the run."""
        self._unsaved.clear()
        self.value = 0
        self._write(0)

    def save(self) -> None:
        """Write the position: the tool has saved everything."""
        self._unsaved.clear()
        self._write(self.value)

    def _read(self) -> int:
        if self._file is not None:
            with suppress(OSError, ValueError):
                return max(0, int(read_regular_file(self._file, _DIGITS + 1)))
        return 0

    def _write(self, position: int) -> None:
        if self._file is None:
            return
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            handle = open_handle(self._file, os.O_WRONLY | os.O_CREAT)
            try:
                os.pwrite(handle, b"%0*d\n" % (_DIGITS, position), 0)
            finally:
                os.close(handle)
