"""One process writes a run: others are refused, and the dead hold nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hookline.errors import RunError
from hookline.runs import Run, lease, open_run
from hookline.runs.lease import Lease, find_lease, read_lease

PREAMBLE = """
import os, signal, socket, sys, time
from pathlib import Path
from hookline.runs import Run, RunError, lease, manifest, open_run
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


def test_a_lease_names_its_holder_and_only_its_owner_can_read_it(run: Run) -> None:
    holder = read_lease(run.path, find_lease(run.path))
    assert (holder["pid"], holder["released"]) == (os.getpid(), False)
    assert {"host", "boot_id", "pid_started", "pid_namespace", "token", "since"} <= set(holder)
    (file,) = run.path.glob("lease-*")
    assert file.stat().st_mode & 0o777 == 0o600
    run.close()
    assert read_lease(run.path, find_lease(run.path))["released"] is True


def test_a_run_that_was_closed_can_be_resumed_by_the_same_process(run: Run) -> None:
    with pytest.raises(RunError, match="already open for writing in this process"):
        Run.open(run.path, resume=True)
    for _ in range(3):
        run.close()
        run = Run.open(run.path, resume=True)
    assert [path.name for path in run.path.glob("lease-*")] == ["lease-4.json"]
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
child = os.fork()  # which neither renews nor releases the lease
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(run.path, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("ends", ["cleanly", "killed"])
def test_a_second_writer_is_refused_until_the_first_has_ended(
    tmp_path: Path, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start(HOLDS, tmp_path) as holder:
        path = Path(said(holder))
        match = rf"is being written by process {holder.pid} on host \S+, since 20\d\d-\S+ \S+ UTC"
        for _ in range(2):
            with pytest.raises(RunError, match=match):
                Run.open(path, resume=True)
        assert open_run(path).status == "training"
        if ends == "killed":
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        else:
            holder.communicate("\n")
    Run.open(path, resume=True).close()
    assert "Waiting up to" not in caplog.text


RACE = """
processes, rounds = 8, 6
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
    assert output.splitlines() == ["1 7"] * 6, errors


ELSEWHERE = """
socket.gethostname = lambda: "elsewhere"
lease.HEARTBEAT_SECONDS = float(sys.argv[2])
run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
run.log(1, 0, "x", 1)
run.flush()
print(run.path, flush=True)
sys.stdin.readline()
run.log(2, 0, "x", 2)
run.event("late")
run.flush()
print(run.lost, run.lease_lost, flush=True)
run.close()
"""


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "STALE_SECONDS", 3.0)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.2)


@pytest.mark.usefixtures("quickly")
def test_a_writer_on_another_host_is_recognized_by_its_heartbeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(ELSEWHERE, tmp_path, 0.5) as holder:
        path = said(holder)
        with pytest.raises(RunError, match=f"process {holder.pid} on host elsewhere"):
            Run.open(path, resume=True)
        # Suspended, and taken over.
        caplog.clear()
        holder.send_signal(signal.SIGSTOP)
        try:
            run = Run.open(path, resume=True)
        finally:
            holder.send_signal(signal.SIGCONT)
        waiting = [record for record in caplog.messages if "Waiting up to 3 s" in record]
        run.log(2, 0, "x", -2)
        assert holder.stderr is not None
        noticed = holder.stderr.readline()  # its next heartbeat does
        output, errors = holder.communicate("\n")
    assert len(waiting) == 1
    assert f"process {holder.pid} on host elsewhere" in waiting[0]
    assert output.startswith("2 The run was taken over by process")
    assert (noticed + errors).count("The run was taken over by process") == 1
    assert run.lease_lost is None
    run.close()
    assert [row["value"] for row in open_run(path).metrics()] == [1, -2]
    assert open_run(path).manifest["status"] == "completed"
    assert len(open_run(path).manifest["attempts"]) == 2
    assert not open_run(path).events("late")


@pytest.mark.usefixtures("quickly")
def test_waiting_for_a_lease_ends_with_ctrl_c(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = next(run.path.glob("lease-*"))
    run.close()
    holder = {**json.loads(file.read_bytes()), "host": "elsewhere", "released": False}
    file.write_text(json.dumps(holder))
    sleep = time.sleep

    def sleep_and_interrupt(seconds: float) -> None:
        sleep(seconds)
        if "Waiting up to" in caplog.text:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lease.time, "sleep", sleep_and_interrupt)
        Run.open(run.path, resume=True)
    assert [path.name for path in run.path.glob("lease-*")] == [file.name]
    Run.open(run.path, resume=True).close()  # after the wait


@pytest.mark.usefixtures("quickly")
def test_a_lease_that_cannot_be_read_becomes_stale(tmp_path: Path) -> None:
    (tmp_path / "lease-7.json").write_bytes(b"")  # its writer died before it wrote anything
    taken = Lease.acquire(tmp_path)
    assert find_lease(tmp_path) == 8
    taken.release()


@pytest.mark.usefixtures("quickly")
def test_a_lease_file_that_was_removed_is_lost(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    next(run.path.glob("lease-*")).unlink()
    end = time.monotonic() + 120
    while run.lease_lost is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "The lease file of this process was removed" in caplog.text
    before = (run.path / "manifest.json").read_bytes()
    run.log(1, 0, "x", 1.0)
    run.close()
    assert (run.path / "manifest.json").read_bytes() == before


def test_the_status_of_a_run_on_another_host_is_known_from_its_heartbeat(run: Run) -> None:
    file = next(run.path.glob("lease-*"))
    run.update(attempts=[{**run.manifest["attempts"][0], "host": "elsewhere"}])
    assert open_run(run.path).status == "training"
    hour_ago = time.time() - 3600
    os.utime(file, (hour_ago, hour_ago))
    assert open_run(run.path).status == "lost"
    os.utime(file)
    assert open_run(run.path).status == "training"


def lease_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hookline-lease"]


def test_ctrl_c_while_a_run_is_created_leaves_no_thread(tmp_path):
    before = lease_threads()

    def interrupt(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code is Lease.acquire.__func__.__code__:
            left -= event == "line"
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return interrupt

    raised: list[BaseException] = []
    for line in range(1, 100):
        left, traced = line, sys.gettrace()
        sys.settrace(interrupt)
        try:
            run = Run.create(tmp_path, config={}, seed=0, hooks=[])
        except KeyboardInterrupt as error:
            raised.append(error)
        else:
            run.close()
            break
        finally:
            sys.settrace(traced)
        assert lease_threads() == before
    assert len(raised) > 3
