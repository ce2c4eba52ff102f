"""Faults while a checkpoint is written: the new checkpoint is complete, or the old one is found."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.checkpoint import (
    CheckpointSaver,
    SaveResult,
    complete_checkpoints,
    find_checkpoint,
    load_checkpoint,
)

CHANGES = ("fsync", "link", "mkdir", "open", "rename", "replace", "rmdir", "unlink", "write")
CALLS = (*CHANGES, "close", "lstat", "scandir", "stat", "statvfs")


def save(folder: Path, value: float, *others: Path) -> list[SaveResult]:
    saver = CheckpointSaver(background=False)
    model = {"w": torch.full((100,), value)}
    saver.save([folder, *others], model=model, state={"v": value}, info={"step": int(value)})
    return saver.finished()


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(".tmp-*"))


class Faults:
    """Lets the n-th system call on files fail, or every one from there on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, n: int, code: int, *, lasting: bool
    ) -> None:
        self.count = 0
        self._n, self._code, self._lasting = n, code, lasting
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        monkeypatch.setattr(io, "open", self._wrap("io.open", io.open))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            fails = self.count >= self._n if self._lasting else self.count == self._n
            if fails and name == "close":
                call(*args, **kwargs)  # also a failing close() closes
            if fails:
                raise OSError(self._code, os.strerror(self._code))
            return None if name == "fsync" else call(*args, **kwargs)  # syncing takes long

        return wrapper


@pytest.mark.parametrize(
    ("code", "lasting"), [(errno.ENOSPC, False), (errno.EIO, True)], ids=["once", "lasting"]
)
def test_an_error_of_any_single_call_leaves_the_old_checkpoint_or_completes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, lasting: bool
) -> None:
    folder = tmp_path / "checkpoints"
    (result,) = save(folder / "old", 0)
    failures = 0
    for n in range(1, 1000):
        assert result.path is not None
        with monkeypatch.context() as context:
            faults = Faults(context, n, code, lasting=lasting)
            results = save(folder / f"step_{n}", n, folder / f"best_{n}")
        failures += check_faulty_save(result.path, results, n)
        for path in complete_checkpoints(folder):
            shutil.rmtree(path)
        with monkeypatch.context() as context:
            Faults(context, 10**9, code, lasting=lasting)  # only without syncing
            (result,) = save(folder / "old", n)
        assert result.path == find_checkpoint(folder) == folder / "old"
        assert not leftovers(folder)
        if faults.count < n:
            break
    assert failures > 30
    assert n > 60


def check_faulty_save(old: Path, results: list[SaveResult], value: int) -> bool:
    """Check what a save with a fault left; return whether it reported an error."""
    for result in results:
        assert (result.error is not None) or (result.path is not None)
        if result.path is not None:
            assert load_checkpoint(result.path).state == {"v": value}
    paths = {old, *(result.path for result in results if result.path is not None)}
    assert set(complete_checkpoints(old.parent)) == paths
    assert {p for p in old.parent.iterdir() if p.name[0] not in "l."} == paths
    assert load_checkpoint(old).state == {"v": value - 1}
    assert find_checkpoint(old.parent) in paths
    return any(result.error is not None for result in results)


KILLS = """
import os, signal, sys, torch
from pathlib import Path
from hookline.checkpoint import CheckpointSaver, find_checkpoint, load_checkpoint
folder = Path(sys.argv[1]) / "runs" / "a" / "checkpoints"
calls = sys.argv[2].split()
saver = CheckpointSaver()
weights = {"w": torch.ones(100)}
fsync = os.fsync
os.fsync = lambda handle: None
def wrap(name, call):
    def wrapper(*args, **kwargs):
        global count
        count += 1
        if count == n:
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapper
n = count = 0
for name in calls:
    setattr(os, name, wrap(name, getattr(os, name)))
saver.save([folder / "step_000000"], model=weights, state={"v": 0}, info={})
saver.wait()
for step in range(1, 1000):
    child = os.fork()
    if child == 0:
        n, count = step, 0
        folders = [folder / f"step_{step:06d}", folder / f"best_{step:06d}"]
        saver.save(folders, model=weights, state={"v": step}, info={})
        saver.wait()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for path in folder.glob("[sb]*_*"):
        assert load_checkpoint(path).state == {"v": int(path.name[5:11])}
    found = load_checkpoint(find_checkpoint(folder)).state["v"]
    assert found in (step, step - 1), (found, step)
    print(code, found == step, flush=True)
    saver.save([folder / f"step_{step:06d}"], model=weights, state={"v": step}, info={})
    saver.wait()
    assert not list(folder.glob(".tmp-*")), list(folder.glob(".tmp-*"))
    for path in folder.glob("[sb]*_*"):
        if int(path.name[5:11]) < step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    if code == 0:
        break
"""


def test_a_kill_before_any_system_call_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", KILLS, str(tmp_path), " ".join(CHANGES)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    *killed, last = run.stdout.splitlines()
    assert len(killed) > 40
    assert set(killed) == {"-9 False", "-9 True"}
    assert last == "0 True"


# -- real faults ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine does not allow mounting")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_full_disk_is_reported_and_the_old_checkpoint_stays(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    assert save(small_disk / "a", 1)[0].error is None
    if not is_checked:  # another process may take the space between the check and the write
        monkeypatch.setattr(shutil, "disk_usage", lambda _: (0, 0, 0))
    saver = CheckpointSaver()
    model = {"w": torch.ones(500_000)}
    saver.save([small_disk / "b"], model=model, state={}, info={})
    saver.wait()
    (result,) = saver.finished()
    assert result.path is None
    message = str(result.error)
    assert f"The checkpoint {small_disk / 'b'} could not be written" in message
    assert "Free space on the disk" in message
    assert ("2.0 MB are needed, and 1.0 MB are free" in message) == is_checked
    assert sorted(p.name for p in small_disk.iterdir()) == ["a", "last"]
    assert load_checkpoint(find_checkpoint(small_disk)).state == {"v": 1}
    assert save(small_disk / "c", 3)[0].error is None


def test_a_read_only_file_system_is_reported(small_disk: Path) -> None:
    save(small_disk / "a", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    (result,) = save(small_disk / "b", 2)
    assert result.path is None
    assert "Read-only file system" in str(result.error)
    assert "Choose another folder" in str(result.error)
    assert load_checkpoint(find_checkpoint(small_disk)).state == {"v": 1}


NOBODY = """
import os, sys, torch
from pathlib import Path
from hookline.checkpoint import CheckpointSaver
saver = CheckpointSaver()
saver.save([Path(sys.argv[1]) / "warm" / "up"], model={}, state={}, info={})
saver.wait()
saver.finished()
(Path(sys.argv[1]) / "shut").mkdir(0o555)
if os.geteuid() == 0:
    os.setuid(65534)
saver.save([Path(sys.argv[1]) / "shut" / "a"], model={}, state={}, info={})
saver.wait()
(result,) = saver.finished()
print(result.path, result.error)
"""


def test_a_folder_without_permission_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOBODY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("None The checkpoint")
    assert "Permission denied" in run.stdout
    assert "Allow writing to the folder" in run.stdout


class SlowSync:
    """Lets the writing thread wait at its first fsync until `release` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, handle: int) -> None:
        if threading.current_thread().name == "hookline-checkpoint":
            self.reached.set()
            assert self._released.wait(20)
        self._fsync(handle)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CheckpointSaver, SlowSync]:
    """A saver that is in the middle of writing `run/checkpoints/b`; `a` is complete."""
    folder = tmp_path / "run" / "checkpoints"
    save(folder / "a", 1)
    slow = SlowSync(monkeypatch)
    saver = CheckpointSaver()
    saver.save([folder / "b"], model={"w": torch.ones(10)}, state={"v": 2}, info={})
    assert slow.reached.wait(20)
    return saver, slow


def test_a_folder_that_is_removed_during_the_write_is_reported(
    tmp_path: Path, slow: tuple[CheckpointSaver, SlowSync]
) -> None:
    saver, sync = slow
    for path in (tmp_path / "run").rglob(".tmp-*"):
        shutil.rmtree(path)
    shutil.rmtree(tmp_path / "run")
    sync.release()
    saver.wait()
    (result,) = saver.finished()
    assert result.path is None
    assert "No such file or directory" in str(result.error)
    assert not (tmp_path / "run").exists()
    assert save(tmp_path / "run" / "checkpoints" / "c", 3)[0].error is None


def test_a_process_that_is_forked_during_the_write_neither_waits_nor_disturbs(
    tmp_path: Path, slow: tuple[CheckpointSaver, SlowSync]
) -> None:
    saver, sync = slow
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            sync.release()
            saver.wait()
            saver.finished()
            saver.save([tmp_path / "child" / "a"], model={}, state={"v": 3}, info={})
            saver.wait()
            os._exit(0 if saver.finished()[0].error is None else 1)
        os._exit(2)
    deadline = time.monotonic() + 120
    status = 0
    while not status and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked process waits for a thread that it does not have")
    assert os.waitstatus_to_exitcode(status) == 0
    sync.release()
    saver.wait()
    (result,) = saver.finished()
    assert result.error is None
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "b").state == {"v": 2}
    assert load_checkpoint(tmp_path / "child" / "a").state == {"v": 3}


def test_ctrl_c_while_waiting_does_not_disturb_the_write(
    tmp_path: Path, slow: tuple[CheckpointSaver, SlowSync]
) -> None:
    saver, sync = slow

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            saver.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert saver.finished() == []
    threading.Timer(0.1, sync.release).start()
    folder = tmp_path / "run" / "checkpoints"
    saver.save([folder / "c"], model={"w": torch.zeros(10)}, state={"v": 3}, info={})
    saver.wait()
    assert [result.error for result in saver.finished()] == [None, None]
    assert torch.equal(load_checkpoint(folder / "b").model["w"], torch.ones(10))
    assert torch.equal(load_checkpoint(folder / "c").model["w"], torch.zeros(10))


ENDING = """
import os, signal, sys, time, torch
from pathlib import Path
from hookline.checkpoint import CheckpointSaver
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
fsync = os.fsync
def slow(handle):
    print("syncing", flush=True)
    time.sleep(0.1)
    fsync(handle)
os.fsync = slow
saver = CheckpointSaver()
saver.save([Path(sys.argv[1]) / "b"], model={"w": torch.ones(9)}, state={"v": 2}, info={})
if sys.argv[2] != "exit":
    time.sleep(60)
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("handler", 143), ("default", -15)])
def test_a_process_that_ends_finishes_its_save_and_one_that_is_killed_leaves_the_old_one(
    tmp_path: Path, how: str, code: int
) -> None:
    save(tmp_path / "a", 1)
    command = [sys.executable, "-c", ENDING, str(tmp_path), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "syncing\n"
    if how != "exit":
        process.terminate()
    assert process.wait(20) == code
    process.stdout.close()
    assert load_checkpoint(find_checkpoint(tmp_path)).state == {"v": 1 if how == "default" else 2}
    save(tmp_path / "c", 3)
    assert not leftovers(tmp_path)
