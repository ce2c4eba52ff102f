"""`hookline init`: what it writes trains, is checked, is tested, and goes on after preemption."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import ENVIRONMENT, run_command, run_hookline, run_in_process

FILES = ["hooks.py", "model.py", "test_hooks.py", "train.schema.json", "train.yaml"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    done = run_in_process("init", "project", "--slurm", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "project"


def test_it_writes_a_folder_and_says_what_to_do_next(tmp_path: Path) -> None:
    done = run_in_process("init", "some/project", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(one.name for one in (tmp_path / "some" / "project").iterdir()) == FILES
    for line in (*FILES, "cd some/project", "hookline train train.yaml", "python -m pytest"):
        assert line in done.stdout
    assert "job.sh" not in done.stdout


def test_without_a_folder_it_is_this_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = run_in_process("init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*FILES, "notes.txt"])
    assert "cd " not in done.stdout


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("mine")
    (tmp_path / "model.py").write_text("mine")
    done = run_in_process("init", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert (
        "model.py, hooks.py already exist in '.', and files are never overwritten." in done.stderr
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["hooks.py", "model.py"]
    assert (tmp_path / "hooks.py").read_text() == "mine"


def test_what_it_writes_is_checked_without_complaint(project: Path) -> None:
    done = run_in_process("check", "train.yaml", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    assert "loss_spikes, lint" in done.stdout
    assert "findings   none\n" in done.stdout


def test_it_trains_something_real(project: Path) -> None:
    done = run_hookline("train", "train.yaml", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    runs = json.loads(run_in_process("runs", "--json", cwd=project).stdout)
    (one,) = [one for one in runs if one["status"] == "completed"]
    lines = Path(project, one["path"], "metrics.jsonl").read_text().splitlines()
    losses = [m["value"] for m in map(json.loads, lines) if m["name"] == "val/loss"]
    assert len(losses) == 3
    assert losses[-1] < 2.2  # 4.6 for a guess; with the frequencies of single letters 3.0
    assert "Loss spikes: 0" in done.stdout
    events = map(json.loads, Path(project, one["path"], "events.jsonl").read_text().splitlines())
    [lint] = [event for event in events if event["kind"] == "lint"]
    assert lint["checks"] > 5
    assert lint["findings"] == 0


def test_the_tests_of_its_hook_pass_and_it_is_clean(project: Path) -> None:
    done = run_command(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    ruff = ["ruff", "check", "--isolated", "--no-cache", "--select", "E,F,UP,B,SIM,RUF"]
    done = run_command(*ruff, "--line-length", "100", ".", cwd=project)
    assert done.returncode == 0, done.stdout


def test_what_is_commented_out_in_the_file_is_valid_too(project: Path) -> None:
    text = (project / "train.yaml").read_text()
    head, body = text.split("\n\n", 1)
    assert head.splitlines()[0] == "# yaml-language-server: $schema=train.schema.json"
    prose = ("Hooks are called", "options of one")
    lines = [
        re.sub(r"^( *)# ( *\S)", r"\1\2", line) if not any(word in line for word in prose) else ""
        for line in body.splitlines()
    ]
    full = "\n".join(lines)
    assert len(yaml.safe_load(full)["hooks"]) == 7
    (project / "full.yaml").write_text(full)
    done = run_in_process("check", "full.yaml", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("early_stopping", "gradient_monitor", "ema (disabled)", "CosineAnnealingLR"):
        assert name in done.stdout


# -- the Slurm job --------------------------------------------------------------------------------


def start(project: Path, log: Path, **variables: str) -> subprocess.Popen[str]:
    slurm = {"SLURM_SUBMIT_DIR": str(project), "SLURM_JOB_ID": "7"}
    with log.open("a") as output:
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=project,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**ENVIRONMENT, **slurm, **variables},
            start_new_session=True,
        )


def wait_for(what: str, log: Path, job: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while what not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        assert job.poll() is None, log.read_text()
        time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="the job is for Slurm")
def test_a_job_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    assert run_in_process("init", ".", "--slurm", cwd=tmp_path).returncode == 0
    assert os.access(tmp_path / "job.sh", os.X_OK)
    log = tmp_path / "log"
    job = start(tmp_path, log)
    wait_for("epoch 2/3  step 218", log, job)  # after the checkpoint of step 200
    os.killpg(job.pid, 9)  # as Slurm does when the time to end is over
    job.wait()
    log.write_text("")
    again = start(tmp_path, log)
    assert again.wait(timeout=120) == 0, log.read_text()
    text = log.read_text()
    assert "completed after " in text
    assert "epoch 1/3" not in text  # it went on
    (run,) = json.loads(run_in_process("runs", "--json", cwd=tmp_path).stdout)
    assert (run["status"], run["steps"]) == ("completed", 327)


@pytest.mark.skipif(sys.platform != "linux", reason="the job is for Slurm")
def test_a_job_whose_time_runs_out_goes_back_into_the_queue(tmp_path: Path) -> None:
    assert run_in_process("init", ".", "--slurm", cwd=tmp_path).returncode == 0
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "scontrol": 'echo "scontrol $@"',
        # Stands in for a training.
        "hookline": 'echo "training $@"; until [ -e go ]; do sleep 0.05; done; exit 3',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    log = tmp_path / "log"
    job = start(tmp_path, log, PATH=f"{tools}{os.pathsep}{ENVIRONMENT['PATH']}")
    wait_for("training train train.yaml --resume", log, job)
    os.kill(job.pid, 10)  # USR1, as #SBATCH --signal says
    wait_for("scontrol requeue 7", log, job)
    (tmp_path / "go").touch()
    assert job.wait(timeout=60) == 3  # and it ends as the training does
