"""Faults of the disk, the clock and other processes: no checkpoint and no record is lost."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from killed_training import compare_ends, newest_run, train
from namespaces import can_mount, enter_namespace, mount_small
from warm_processes import WarmParent

import hookline
from hookline.checkpoint import load_checkpoint

needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mounts of its own (Linux)")


def soaked(*values: Any) -> list[Any]:
    """Return parameters of tests that only `make soak` runs."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


class At(hookline.Hook):
    """Calls a function once, in a step.

    Args:
        step: the step.
        function: gets the trainer.
    """

    def __init__(self, step: int, function: Callable[[Any], Any]) -> None:
        self._step, self._function = step, function

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Call it."""
        if step == self._step:
            self._function(trainer)


def train_to_the_end(folder: str) -> None:
    """Continue the run in a folder, or start one."""
    train(Path(folder))


@pytest.fixture(scope="module")
def parent() -> Iterator[WarmParent]:
    with WarmParent() as parent:
        yield parent


@pytest.fixture(scope="module")
def whole(parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without faults."""
    folder = tmp_path_factory.mktemp("whole")
    process = parent.start(train_to_the_end, folder, log=folder / "log.txt")
    assert process.wait() == 0, process.output
    return folder


def finish(parent: WarmParent, folder: Path) -> str:
    """Continue a run to its end; return what was printed."""
    process = parent.start(train_to_the_end, folder, log=folder / "finished.txt")
    assert process.wait() == 0, process.output
    return process.output


def check_checkpoints(folder: Path) -> int:
    """Check that all checkpoints of a run are complete; return how many there are."""
    checkpoints = [p for p in newest_run(folder).glob("checkpoints/[!.]*") if p.is_dir()]
    for checkpoint in checkpoints:
        load_checkpoint(checkpoint)
    return len(checkpoints)


def last_step(folder: Path) -> int:
    """Return the number of steps of the run in a folder."""
    return int(hookline.open_run(newest_run(folder)).overview()["steps"])


# -- kills in the middle of file operations --------------------------------------------------------

_CALLS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree")


def train_and_die_at_call(folder: str, number: str, written: str) -> None:
    """Die before the n-th call that creates, renames or removes something in `checkpoints`."""
    calls: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CALLS and "/checkpoints/" in str(arguments[0]):
            calls.append(event)
            if len(calls) == int(number):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(Path(folder), max_steps=12)
    Path(written).write_text(json.dumps(calls))


@pytest.fixture(scope="module")
def calls(parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The file operations of a training without faults."""
    folder = tmp_path_factory.mktemp("calls")
    arguments = (folder, 0, folder / "calls.json")
    process = parent.start(train_and_die_at_call, *arguments, log=folder / "log.txt")
    assert process.wait() == 0, process.output
    return json.loads((folder / "calls.json").read_text())


# Not the last tenth: there a training with these few steps has ended, and `finish` goes beyond it.
@pytest.mark.parametrize("share", [0.6, *soaked(0.3, 0.8)])
def test_a_kill_between_two_file_operations_leaves_complete_checkpoints(
    parent: WarmParent, whole: Path, calls: list[str], tmp_path: Path, share: float
) -> None:
    number = round(share * len(calls))
    arguments = (tmp_path, number, tmp_path / "calls.json")
    process = parent.start(train_and_die_at_call, *arguments, log=tmp_path / "log.txt")
    assert process.wait() == -signal.SIGKILL, process.output
    assert check_checkpoints(tmp_path) > 0
    finish(parent, tmp_path)
    assert check_checkpoints(tmp_path) > 0
    assert list(newest_run(tmp_path).rglob(".tmp-*")) == []
    assert compare_ends(whole, tmp_path) == []


def train_and_die_before_rename(folder: str, name: str) -> None:
    """Die when a checkpoint of this name is about to get it."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(str(arguments[1])).name == name:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(Path(folder))


@pytest.mark.parametrize("name", ["epoch_0004", *soaked("epoch=4-step=24", "step=28")])
def test_a_kill_between_two_checkpoints_of_one_step_loses_neither(
    parent: WarmParent, whole: Path, tmp_path: Path, name: str
) -> None:
    process = parent.start(train_and_die_before_rename, tmp_path, name, log=tmp_path / "log.txt")
    assert process.wait() == -signal.SIGKILL, process.output
    finish(parent, tmp_path)
    assert list(newest_run(tmp_path).rglob(".tmp-*")) == []
    assert compare_ends(whole, tmp_path) == []


ENDS = {
    "early stopping within an epoch": {},
    "early stopping at the end of an epoch": {"stops_at": 1.31},
    "the last epoch": {"max_epochs": 2},
    "the last step": {"max_steps": 13},
}


def train_to_end(folder: str, end: str) -> None:
    """Continue the run in a folder, or start one, until one of the ends."""
    train(Path(folder), **ENDS[end])


def train_and_die_at_end(folder: str, end: str) -> None:
    """Train until one of the ends, and die in `on_train_end`."""

    class Die(hookline.Hook):
        def on_train_end(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    train(Path(folder), Die(), **ENDS[end])


@pytest.mark.parametrize(
    "end", ["early stopping within an epoch", "the last step", *soaked(*list(ENDS)[1:3])]
)
def test_a_run_that_is_killed_at_its_end_ends_in_the_same_way(
    parent: WarmParent, tmp_path: Path, end: str
) -> None:
    killed, other = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    other.mkdir()
    process = parent.start(train_and_die_at_end, killed, end, log=tmp_path / "log.txt")
    assert process.wait() == -signal.SIGKILL, process.output
    for folder in (killed, other):
        process = parent.start(train_to_end, folder, end, log=tmp_path / "log.txt")
        assert process.wait() == 0, process.output
    assert compare_ends(other, killed) == []


# -- the disk --------------------------------------------------------------------------------------


class Messages(logging.Handler):
    """Prints what is logged, with its level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        print(f"{record.levelname}: {record.getMessage()}", flush=True)


def train_on_full_disk(folder: str) -> None:
    """Train on a file system that another file fills up, and keep what was left."""
    logging.getLogger("hookline").addHandler(Messages())
    enter_namespace()
    small = Path(folder) / "small"
    mount_small(small, "3m")

    def fill(_: Any) -> None:
        with (small / "fill").open("wb") as file, suppress(OSError):
            while True:  # until there is no space at all: the records wait too
                file.write(b"0" * 4096)
                file.flush()

    trainer = train(small, At(7, fill), At(15, lambda _: (small / "fill").unlink()))
    print(f"ended {trainer.status} at {trainer.step}")
    shutil.copytree(small, Path(folder) / "kept")


@needs_mounts
def test_training_goes_on_when_the_disk_is_full_and_saves_when_it_is_not_any_more(
    parent: WarmParent, whole: Path, tmp_path: Path
) -> None:
    process = parent.start(train_on_full_disk, tmp_path, log=tmp_path / "log.txt")
    assert process.wait() == 0, process.output
    assert f"ended stopped at {last_step(whole)}" in process.output
    lines = [line for line in process.output.splitlines() if line.startswith(("WARN", "ERR"))]
    assert any("checkpoint" in line and "space" in line for line in lines), process.output
    kept = tmp_path / "kept"
    check_checkpoints(kept)
    steps = {saved.step for saved in hookline.open_run(newest_run(kept)).checkpoints()}
    assert last_step(whole) in steps
    assert list(newest_run(kept).rglob(".tmp-*")) == []
    assert [d for d in compare_ends(whole, kept) if "checkpoint" not in d] == []
