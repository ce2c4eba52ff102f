"""UploadHook: copies every checkpoint somewhere else, in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hookline.checkpoint.retention import pointed, remove_checkpoint
from hookline.errors import CheckpointError
from hookline.hook import Rank
from hookline.hooks.checkpointing.destination import Bundle, StoppedError, destination_of
from hookline.options import BuiltIn

__all__ = ["UploadHook"]

log = logging.getLogger("hookline")


class UploadHook(BuiltIn):
    """Copies every checkpoint to a folder or a URL, in the background, and verifies the copy.

    Copies go to `<destination>/<run id>/<checkpoint>`. They are made under a temporary name, read
    back and compared with the hashes in the checkpoint's manifest, and only then get their name. A
    copy that fails is tried again; in the end it is logged and counted, and training goes on. What
    was removed before its turn came is left out. Copies are never removed.

    Args:
        destination: a folder, or a URL of anything that fsspec knows: `s3://bucket/runs`.
        retries: how often a failed copy is tried again.
        backoff: seconds before the first retry; they double with each.
        timeout: at the end of training, how many seconds to wait for what is not copied yet.
        max_waiting: how many checkpoints may wait; the oldest is left out when there are more.
        keep_local: keep the local checkpoint; else it is removed once its copy is verified, unless
            `last` or `best` names it.
    """

    hookline_rank = Rank.WRITER
    cost = (
        "Nothing on the training thread; a second thread reads, writes and hashes each checkpoint."
    )

    def __init__(
        self,
        destination: str | Path,
        retries: NonNegativeInt = 3,
        backoff: Annotated[float, Field(ge=0)] = 1.0,
        timeout: PositiveFloat = 600.0,
        max_waiting: PositiveInt = 8,
        keep_local: bool = True,
    ) -> None:
        self._destination = destination_of(destination)
        self._retries, self._backoff = retries, backoff
        self._timeout, self._max_waiting = timeout, max_waiting
        self._keep_local = keep_local
        self._worker: _Worker | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.uploaded: dict[Path, str] = {}
        """Where the copies are, by checkpoint."""
        self.failed: list[Path] = []
        """Checkpoints that could not be copied."""
        self.skipped: list[Path] = []
        """Checkpoints that were left out: removed before their turn, or too many were waiting."""

    # -- events -----------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Count from the beginning."""
        self._start_afresh()

    def on_checkpoint_save(self, trainer: Any, checkpoint_path: Any) -> None:
        """Let the checkpoint be copied."""
        if self._worker is None:
            run = getattr(trainer, "run", None)
            self._worker = _Worker(self._copy, "" if run is None else run.id)
        for path in self._worker.add(Path(checkpoint_path), self._max_waiting):
            log.warning("Too many checkpoints wait to be copied: %s is left out.", path)
            self.skipped.append(path)
        self._remove_local()

    def on_train_end(self) -> None:
        """Wait for the copies that are not made yet."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        left = worker.end(self._timeout)
        if left:
            self.failed += left
            log.error(
                "%d checkpoints were not copied in %g seconds: %s. They are still here.",
                len(left),
                self._timeout,
                ", ".join(map(str, left)),
            )
        self._remove_local()

    # -- on the worker's thread -------------------------------------------------------------------

    def _copy(self, path: Path, under: str, stop: threading.Event) -> None:
        """Copy a checkpoint, however often it takes; note what became of it."""
        for attempt in range(self._retries + 1):
            try:
                bundle = Bundle.of(path)
                self.uploaded[path] = self._destination.upload(bundle, under, stop.is_set)
            except StoppedError:
                break
            except Exception as error:  # anything a network or a disk may come up with
                if not path.exists():
                    log.info("%s was removed before it was copied.", path)
                    self.skipped.append(path)
                    return
                last = attempt == self._retries or isinstance(error, CheckpointError)
                log.log(
                    logging.ERROR if last else logging.WARNING,
                    "%s could not be copied (%s: %s)%s",
                    path,
                    type(error).__name__,
                    error,
                    "; training goes on." if last else "; it will be tried again.",
                )
                if last or stop.wait(self._backoff * 2**attempt):
                    break
            else:
                log.info("%s was copied to %s.", path, self.uploaded[path])
                return
        if stop.is_set():
            log.error("%s was not copied: there was no more time.", path)
        if path not in self.failed:  # the end may have given it up already
            self.failed.append(path)

    # -- on the training thread -------------------------------------------------------------------

    def _remove_local(self) -> None:
        """Remove what has a copy; here, where nobody else removes checkpoints meanwhile."""
        if self._keep_local:
            return
        for path in list(self.uploaded):
            if path.is_dir() and path.name not in pointed(path.parent):
                remove_checkpoint(path)


class _Worker:
    """A thread that copies one checkpoint after the other; it ends when nothing more will come."""

    def __init__(self, copy: Callable[[Path, str, threading.Event], None], under: str) -> None:
        self._copy, self._under = copy, under
        self._waiting: deque[Path] = deque()
        self._current: Path | None = None
        self._ends = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hookline-upload", daemon=True)
        self._thread.start()

    def add(self, path: Path, limit: int) -> list[Path]:
        """Let a checkpoint wait for its turn; return those that are left out for it."""
        with self._changed:
            self._waiting.append(path)
            left_out = [self._waiting.popleft() for _ in range(len(self._waiting) - limit)]
            self._changed.notify()
        return left_out

    def end(self, timeout: float) -> list[Path]:
        """Wait until all is copied; return what was not, when there is no more time."""
        with self._changed:
            self._ends = True
            waiting = len(self._waiting) + (self._current is not None)
            self._changed.notify()
        if waiting:
            log.info("Waiting for %d checkpoints to be copied, for %g seconds.", waiting, timeout)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return []
        self._stop.set()
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            current = self._current
        self._thread.join(1.0)  # it looks between chunks; a hung network call holds it longer
        return [current, *left] if self._thread.is_alive() and current is not None else left

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                while not self._waiting and not self._ends:
                    self._changed.wait()
                if not self._waiting:
                    return
                self._current = self._waiting.popleft()
            self._copy(self._current, self._under, self._stop)
