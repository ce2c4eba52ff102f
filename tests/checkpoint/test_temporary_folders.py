"""Temporary folders while another thread or process removes leftovers."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from leftovers import leave_unfinished_folder

from hookline.checkpoint import CheckpointSaver, atomic_files
from hookline.checkpoint.atomic_files import remove_leftovers, temporary_folder, write_atomic
from hookline.runs import Run


def test_who_removes_a_folder_holds_its_lock_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".tmp-best-0123abcd.hookline"
    folder.mkdir()
    # As a writer does that has created its marker, and is about to lock it.
    handle = os.open(folder / ".hookline-writer", os.O_RDWR | os.O_CREAT)
    unlink, refused = Path.unlink, []

    def unlink_and_lock(path: Path, missing_ok: bool = False) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_and_lock)
    remove_leftovers(tmp_path)
    assert refused == [".hookline-writer"]
    assert not folder.exists()
    os.close(handle)


def test_a_folder_that_is_removed_while_it_is_being_locked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = atomic_files._lock, []

    def remove_first(marker: Path) -> Any:
        if not removed:
            removed.append(marker.parent)
            marker.parent.rmdir()
            raise FileExistsError(17, "File exists")  # from FileLock, which creates the parent
        return lock(marker)

    monkeypatch.setattr(atomic_files, "_lock", remove_first)
    with temporary_folder(tmp_path, "best") as folder:
        assert folder != removed[0]
        assert folder.is_dir()
    write_atomic(tmp_path / "best", "1")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_resumed_run_starts_without_the_unfinished_checkpoint_of_its_last_process(
    tmp_path: Path,
) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    run.close("interrupted")
    run.checkpoints.mkdir()
    leave_unfinished_folder(run.checkpoints, "step_000002")
    Run.open(run.path, resume=True).close()
    assert list(run.checkpoints.iterdir()) == []


class CtrlC:
    """Sends SIGINT to this process at the n-th line that runs in the file of temporary folders."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_code.co_filename == atomic_files.__file__:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self


def test_ctrl_c_at_any_line_of_a_save_leaves_nothing_behind_after_the_next_one(tmp_path):
    raised: list[BaseException] = []  # kept, as a notebook does, with all that their frames hold
    for number in count(1):
        folder = tmp_path / str(number)
        traced = sys.gettrace()
        sys.settrace(CtrlC(number))
        try:
            save(folder / "step_1")
        except KeyboardInterrupt as error:
            raised.append(error)
        else:
            break
        finally:
            sys.settrace(traced)
        save(folder / "step_2")
        assert (folder / "step_2").is_dir()
        assert not list(folder.glob(".tmp*")), number
    assert len(raised) > 50


def save(folder: Path) -> None:
    saver = CheckpointSaver(background=False)
    saver.save([folder], model={}, state={}, info={"step": 1})
