"""Writing a checkpoint together: every rank writes the parts of tensors that it has.

A rank other than 0 writes its files into a temporary folder beside the checkpoint, and a note when
they are complete. Rank 0 waits for the notes, moves the files into its own temporary folder, and
writes the manifest: the checkpoint is there completely or not at all. The ranks share nothing but
the file system, and a token that is part of the folders' names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from hookline.checkpoint.atomic_files import (
    TEMPORARY,
    create_folder,
    create_locked_folder,
    remove_locked_folder,
)
from hookline.checkpoint.checkpoint_writer import (
    AbandonedError,
    CheckpointWriter,
    SaveResult,
    describe_failure,
)
from hookline.checkpoint.state_tree import decode
from hookline.errors import CheckpointError

__all__ = ["PartWriter", "SharedSave", "SharedSaves", "SharedWriter"]

_NOTE = "part.json"
_LONGEST_WAIT = 600.0  # seconds
_PAUSE = 0.02


@dataclass(frozen=True)
class SharedSave:
    """A save of several processes.

    Attributes:
        token: The same in all processes, and different for each save.
        rank: The rank of this process.
        size: The number of processes.
    """

    token: str
    rank: int
    size: int

    def folder_name(self, rank: int) -> str:
        """Return what the name of a rank's temporary folder contains."""
        return f"{self.token}-rank{rank}"


class SharedSaves:
    """Gives every save of several processes a token that all of them know without a message.

    Args:
        token: The same in all processes, and different from that of any other run.
        rank: The rank of this process.
        size: The number of processes.
    """

    def __init__(self, token: str, rank: int, size: int) -> None:
        self._token, self._rank, self._size = token, rank, size
        self._saves = 0

    def next(self) -> SharedSave:
        """Return the next save; all processes have to call this for each of them."""
        self._saves += 1
        return SharedSave(f"{self._token}-{self._saves}", self._rank, self._size)


class PartWriter(CheckpointWriter):
    """Writes the files of a rank other than 0."""

    shared: SharedSave
    requested: Path | None = None
    """The checkpoint that it is a part of."""

    _folder: Path | None = None
    _lock: Any = None

    def write(self, folder: Path, *, move_last: bool) -> SaveResult:
        """Write this rank's files for the checkpoint in a folder; rank 0 makes it complete."""
        error: CheckpointError | None = None
        replaced = False
        try:
            create_folder(folder.parent)
            name = self.shared.folder_name(self.shared.rank)
            self._folder, self._lock = create_locked_folder(folder.parent, name)
            note = self._write_part(self._folder)
            replaced = note.get("error") == _ABANDONED
            self._write_file(self._folder / f".{_NOTE}", memoryview(json.dumps(note).encode()))
            (self._folder / f".{_NOTE}").rename(self._folder / _NOTE)
        except Exception as failure:
            error = CheckpointError(describe_failure(failure, folder, None, self._folder))
            error.__cause__ = failure
        seconds = perf_counter() - self._begin
        return SaveResult(folder, None, decode(self._info, {}), error, replaced, seconds)

    def _write_part(self, folder: Path) -> dict[str, Any]:
        files: dict[str, Any] = {}
        try:
            for name, data in self._files.items():
                files[name] = {"size": len(data), "xxh3_64": self._write_file(folder / name, data)}
        except AbandonedError:
            return {"error": _ABANDONED}
        except OSError as failure:
            return {"error": f"rank {self.shared.rank}: {failure}"}
        return {"files": files}

    def close(self) -> None:
        """Remove the temporary folder, once rank 0 has finished."""
        if self._folder is not None:
            remove_locked_folder(self._folder, self._lock)
            self._folder = self._lock = None


_ABANDONED = "abandoned"


class SharedWriter(CheckpointWriter):
    """Writes a checkpoint in rank 0, with the files of the other ranks."""

    shared: SharedSave

    def _add_files(self, folder: Path) -> None:
        """Move the files of the other ranks into the folder; link or copy them for a second one."""
        if self._parts:
            for name in self._parts:
                if not self._link(folder / name):
                    self._copy_linkable(folder / name)
            return
        for rank in range(1, self.shared.size):
            part = self._wait_for_part(folder.parent.parent, rank)
            note = json.loads((part / _NOTE).read_bytes())
            if note.get("error") == _ABANDONED:
                raise AbandonedError
            if "error" in note:
                raise OSError(note["error"])
            for name, facts in note["files"].items():
                (part / name).rename(folder / name)
                self._parts[name] = facts

    def _wait_for_part(self, parent: Path, rank: int) -> Path:
        pattern = f"{TEMPORARY}{self.shared.folder_name(rank)}-*.hookline/{_NOTE}"
        end = monotonic() + _LONGEST_WAIT
        while monotonic() < end:
            if self.is_abandoned:
                raise AbandonedError
            for note in parent.glob(pattern):
                return note.parent
            sleep(_PAUSE)
        raise OSError(f"rank {rank} has not written its part within {_LONGEST_WAIT:.0f} s")
