"""CheckpointSaver: copies a state on the calling thread, and writes it on another one."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from torch import Tensor

from hookline.checkpoint.state_tree import SnapshotBuffers, decode, encode_info, encode_state
from hookline.checkpoint.writer import (
    CheckpointWriter,
    SaveResult,
    ShardWriter,
    SharedSave,
)
from hookline.errors import CheckpointError

_START_SECONDS = 1.0  # for a thread whose start was interrupted by a signal
_NICENESS = 10  # with 19, a write beside training on all cores took a minute
_LOWEST_PRIORITY = 19


class CheckpointSaver:
    """Copies a state on the calling thread, and writes it as a checkpoint on another thread.

    At most one save is being written. A process that ends normally finishes it first.

    Args:
        background: Write on another thread; otherwise before `save` returns.
        when_busy: What `save` does while the previous checkpoint is being written: `wait` for it,
            or `replace` it: that checkpoint is abandoned. A save that replaced another one is
            not replaced itself, so that checkpoints are completed at any rate of requests.

    Example:
        ```python
        saver = CheckpointSaver()
        saver.save([Path("checkpoints/step_000120")], model=model.state_dict(), state={}, info={})
        ...  # training goes on, and may change the weights
        saver.wait()
        for result in saver.finished():
            print(result.path or result.error)
        ```
    """

    def __init__(
        self, *, background: bool = True, when_busy: Literal["wait", "replace"] = "wait"
    ) -> None:
        import_module("filelock")  # not on the writing thread: a fork during it could deadlock
        self._background = background
        self._when_busy = when_busy
        self._buffers = SnapshotBuffers()
        self._write: _Write | None = None
        self._results: deque[SaveResult] = deque()
        self._shards: list[ShardWriter] = []  # of a rank other than 0, until rank 0 has them

    def prepare(
        self, *, model: Mapping[str, Tensor], state: Mapping[str, Any], shards_only: bool = False
    ) -> None:
        """Allocate the memory for copies of this state, so that the first save is fast too."""
        encoded = encode_state(model, state)
        encoded = encoded.shards_only() if shards_only else encoded
        self.wait()
        self._buffers.reserve(encoded)

    def save(
        self,
        folders: Sequence[Path],
        *,
        model: Mapping[str, Tensor],
        state: Mapping[str, Any],
        info: Mapping[str, Any],
        sync: Sequence[Path] = (),
        shared: SharedSave | None = None,
    ) -> None:
        """Copy a state now, and write it into each of the folders later.

        The first folder that can be written gets the bytes; the others get hard links to them where
        the file system supports these. `finished` returns a result for each folder. In each
        folder's parent, `last` names the checkpoint afterwards, unless `info["emergency"]` or
        `info["weights_only"]` is true.

        Args:
            folders: Such as `checkpoints/step_000120`. An existing folder is never changed: the
                checkpoint is then called `step_000120_2`, `step_000120_3` … Names that begin with
                a dot, and `last` and `best`, get an underscore in front.
            model: The model's `state_dict`. Tied weights are written once.
            state: Everything else, as nested dicts, lists, tuples, numbers, strings and tensors.
            info: Numbers and strings for the manifest. Tensors with one element become numbers.
            sync: Files that have to be on the disk before the checkpoint is there, such as a log
                whose length is part of the state.
            shared: Several processes save sharded tensors together, each with this call. Rank 0's
                result says whether the checkpoint is complete; the others then call
                `release_shards`.
        """
        begin = perf_counter()
        encoded, encoded_info = encode_state(model, state), encode_info(info)
        rank = 0 if shared is None else shared.rank
        if rank:
            encoded, folders = encoded.shards_only(), folders[:1]
        folders = [Path(folder).absolute() for folder in folders]  # the process may change its own
        replaces = self._finish_previous()
        try:
            files = self._buffers.copy(encoded, rank)
        except (RuntimeError, MemoryError) as failure:  # there is not enough memory
            self._results.extend(_not_copied(folder, failure, encoded_info) for folder in folders)
            return
        writer_class = ShardWriter if rank else CheckpointWriter
        writer = writer_class(files, encoded_info, begin, sync, encoded.tree, shared)
        if isinstance(writer, ShardWriter):
            writer.requested = folders[0]
            self._shards.append(writer)
        move_last = not (info.get("emergency") or info.get("weights_only"))
        self._write = _Write(writer, folders, move_last, self._results, replaces)
        if self._background:
            self._write.start()
        else:
            self._write.run()

    def finished(self) -> list[SaveResult]:
        """Return what became durable, failed or was replaced since the last call."""
        results: list[SaveResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def release_shards(self, folders: Collection[Path] | None = None) -> None:
        """Remove this rank's temporary files of these checkpoints, or of all."""
        released = [one for one in self._shards if folders is None or one.requested in folders]
        if self._write is not None and self._write.writer in released:  # rank 0 has failed before
            self.wait()
        self._shards = [one for one in self._shards if one not in released]
        for one in released:
            one.close()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._write is not None:
            self._write.wait()

    def close(self) -> None:
        """Wait until nothing is being written, and free the memory."""
        self.wait()
        self.release_shards()
        self._write = None
        self._buffers = SnapshotBuffers()

    def _finish_previous(self) -> bool:
        """Wait until the memory may be used again; return whether a save was replaced."""
        previous = self._write
        if previous is None or not previous.is_running():
            return False
        replace = self._when_busy == "replace" and not previous.replaces
        if replace:
            previous.writer.is_abandoned = True
        previous.wait()
        return replace


def _not_copied(folder: Path, failure: Exception, info: Any) -> SaveResult:
    error = CheckpointError(
        f"The checkpoint {folder} was not written, because the state could not be copied: {failure}"
    )
    error.__cause__ = failure
    return SaveResult(folder, None, decode(info, {}), error, replaced=False, seconds=0.0)


class _Write:
    """One save that is being written, on a thread of its own.

    The thread exists only while it writes, and the interpreter waits for it at exit: it is not
    a daemon. A process that is forked meanwhile has no such thread, and does not wait for it.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        folders: Sequence[Path],
        move_last: bool,
        results: deque[SaveResult],
        replaces: bool,
    ) -> None:
        self.writer = writer
        self.replaces = replaces
        self._folders = folders
        self._move_last = move_last
        self._results = results
        self._started, self._done = threading.Event(), threading.Event()
        self._process = os.getpid()
        self._thread: int | None = None
        self._is_awaited = False

    def start(self) -> None:
        self.writer.is_urgent = False  # until `wait` is called
        thread = threading.Thread(target=self._run_in_thread, name="hookline-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the interpreter is about to exit
            self.run()
        except BaseException:  # of a signal's handler: the thread may or may not have started
            if not self._started.wait(_START_SECONDS):
                self.writer.is_abandoned = True
                self._done.set()
            raise

    def run(self) -> None:
        """Write into all folders. The results are there only once the memory is free again."""
        try:
            write = self.writer.write
            self._results.extend([write(f, move_last=self._move_last) for f in self._folders])
        finally:
            self._done.set()

    def is_running(self) -> bool:
        return self._process == os.getpid() and not self._done.is_set()

    def wait(self) -> None:
        # Not `Thread.join`: in Python 3.11, Ctrl-C during it marks a running thread as ended.
        if self.is_running():
            self._is_awaited = self.writer.is_urgent = True
            self._set_niceness(0)  # not allowed everywhere
            self._done.wait()

    def _run_in_thread(self) -> None:
        self._started.set()
        self._thread = threading.get_native_id()
        if not self._is_awaited:
            self._set_niceness(_NICENESS)
        self.run()

    def _set_niceness(self, more: int) -> None:
        """Set the thread's niceness to that of the process and some more."""
        if self._thread is not None and sys.platform == "linux":  # elsewhere threads have none
            with suppress(OSError):
                niceness = os.getpriority(os.PRIO_PROCESS, self._process) + more
                os.setpriority(os.PRIO_PROCESS, self._thread, min(niceness, _LOWEST_PRIORITY))
