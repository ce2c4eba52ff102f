"""One process writes a run: others are refused, and the dead hold nothing."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import RunError
from hookline.runs import Run, lock, open_run

PREAMBLE = """
import os, signal, socket, sys, time
from pathlib import Path
from hookline.runs import Run, RunError, manifest, open_run
manifest.read_git_state = lambda: {}  # faster
"""


def start(script: str, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, config={}, seed=0, hooks=[])


def test_a_run_that_was_closed_can_be_resumed_by_the_same_process(run: Run) -> None:
    with pytest.raises(RunError, match="already open for writing in this process"):
        Run.open(run.path, resume=True)
    for _ in range(3):
        run.close()
        run = Run.open(run.path, resume=True)
    run.close()


def test_a_run_that_cannot_be_resumed_is_not_held(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.close()
    (run.path / "repeated.jsonl").mkdir()
    with pytest.raises(RunError, match=r"repeated\.jsonl"):
        Run.open(run.path, resume=True, position={"metrics": -1})
    (run.path / "repeated.jsonl").rmdir()
    Run.open(run.path, resume=True).close()


HOLDS = """
run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
child = os.fork()  # which neither keeps nor releases the lock
if child == 0:
    os.closerange(0, 3)
    time.sleep(30)
    os._exit(0)
print(run.path, flush=True)
sys.stdin.readline()
"""


def test_a_second_writer_is_refused_until_the_first_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(HOLDS, tmp_path) as holder:
        path = Path(said(holder))
        match = rf"is being written by process {holder.pid} on host \S+, since 20\d\d-\S+ \S+ UTC"
        for _ in range(2):
            with pytest.raises(RunError, match=match):
                Run.open(path, resume=True)
        assert open_run(path).status == "training"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    Run.open(path, resume=True).close()
    assert "Waiting up to" not in caplog.text


RACE = """
processes, rounds = 6, 3
run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
run.close()
for number in range(rounds):
    start_read, start_write = os.pipe()
    result_read, result_write = os.pipe()
    end_read, end_write = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            os.close(start_write), os.close(end_write)
            os.read(start_read, 1)  # all start at the same instant
            try:
                mine = Run.open(run.path, resume=True)
                os.write(result_write, b"w")
            except RunError as error:
                os.write(result_write, b"r" if "is being written by" in str(error) else b"?")
            os.read(end_read, 1)
            if number % 3 == 1:
                os._exit(0)  # as if it were killed
            if "mine" in globals():
                mine.close()
            os._exit(0)
        children.append(child)
    os.close(start_write)
    results = b""
    while len(results) < processes:
        results += os.read(result_read, 100)
    print(results.count(b"w"), results.count(b"r"), flush=True)
    os.close(end_write)
    for child in children:
        os.waitpid(child, 0)
    for handle in (start_read, result_read, result_write, end_read):
        os.close(handle)
"""


def test_of_processes_that_resume_at_the_same_instant_exactly_one_wins(tmp_path: Path) -> None:
    with start(RACE, tmp_path) as race:
        output, errors = race.communicate()
    assert output.splitlines() == ["1 5"] * 3, errors


def test_a_dead_holder_on_another_machine_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file server may keep the lock for a while; here this process does."""
    run.update(attempts=[{**run.manifest["attempts"][0], "host": "elsewhere"}])
    assert open_run(run.path).status == "training"
    monkeypatch.setattr(lock, "WAIT_SECONDS", 1.5)
    with pytest.raises(RunError, match="on host elsewhere, since"):
        Run.open(run.path, resume=True)
    assert "Waiting up to 2 s" in caplog.text
    monkeypatch.setattr(lock.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Run.open(run.path, resume=True)
    assert run._lock is not None
    run._lock.release()
    assert open_run(run.path).status == "lost"
    Run.open(run.path, resume=True).close()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOLCK, "No locks available"), ImportError("No module named 'fcntl'")]
)
def test_without_locks_a_run_is_written_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(lock, "_flock", refuse)
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    assert f"cannot be locked ({error})" in caplog.text
    with pytest.raises(RunError, match="already open for writing in this process"):
        Run.open(run.path, resume=True)
    run.close()
    Run.open(run.path, resume=True).close()
