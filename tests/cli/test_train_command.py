"""`hookline train`, `check` and `schema`, as a user meets them: real processes and files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, HOOKLINE, run_hookline, run_in_process
from small_project import PROJECT, TRAINING
from warm_processes import WarmProcess, start_warm

import hookline


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(PROJECT)
    (tmp_path / "late.py").write_text("")
    (tmp_path / "train.yaml").write_text(TRAINING)
    return tmp_path


def runs_in(project: Path) -> list[Path]:
    return sorted((project / "runs").iterdir()) if (project / "runs").exists() else []


def test_train_ends_with_the_runs_path(project: Path) -> None:
    done = run_hookline(
        "train", "train.yaml", "trainer.max_epochs=1", "model.init_args.width=5", cwd=project
    )
    assert done.returncode == 0, done.stderr
    (path,) = runs_in(project)
    assert done.stdout.splitlines()[-1].split() == ["run", f"runs/{path.name}"]
    assert "completed after 4 steps" in done.stdout
    manifest = hookline.open_run(path).manifest
    assert manifest["status"] == "completed"
    assert manifest["config"]["model"]["init_args"] == {"width": 5}
    assert done.stdout.startswith(f"config {manifest['config_hash'][:8]}  train.yaml\n")
    assert done.stderr == ""


def start(project: Path) -> WarmProcess:
    words = ["-m", "hookline", "train", "train.yaml"]
    environment = {**ENVIRONMENT, "WAITS": "1"}
    return start_warm(words, cwd=project, environment=environment, log=project / "log.txt")


def wait_for_a_checkpoint(project: Path) -> Path:
    for _ in range(2400):
        found = list((project / "runs").glob("*/checkpoints/last"))
        if found:
            return found[0].parent.parent
        time.sleep(0.05)
    raise AssertionError("no checkpoint")


def test_ctrl_c_leaves_a_run_that_resume_goes_on_with(project: Path) -> None:
    process = start(project)
    path = wait_for_a_checkpoint(project)
    process.send_signal(signal.SIGINT)
    (project / "go").touch()
    assert process.wait() == 130
    printed, errors = process.output, process.errors
    command = f"hookline train train.yaml --resume {path.name}"
    assert errors == f"hookline: Interrupted. To resume: {command}\n"
    assert printed.splitlines()[-1] == f"run runs/{path.name}"
    assert hookline.open_run(path).status == "interrupted"

    other = run_hookline("train", "train.yaml", "model.init_args.width=4", "--resume", cwd=project)
    assert "no unfinished run of this configuration. Starting a new run." in other.stdout
    assert f"The nearest unfinished run is {path.name} (interrupted)" in other.stdout
    assert "model.init_args.width is 4 here, " in other.stdout
    assert len(runs_in(project)) == 2

    again = run_hookline("train", "train.yaml", "trainer.progress=off", "--resume", cwd=project)
    assert again.returncode == 0, again.stderr
    assert f"Resuming the run {path.name} (interrupted) from runs/{path.name}/" in again.stdout
    assert again.stdout.splitlines()[-1] == f"run runs/{path.name}"
    opened = hookline.open_run(path)
    assert opened.status == "completed"
    assert opened.overview()["steps"] == 8
    assert len(runs_in(project)) == 2


def test_a_killed_run_is_resumed_too_and_in_any_place_of_the_line(project: Path) -> None:
    process = start(project)
    path = wait_for_a_checkpoint(project)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = run_hookline("train", "--resume", "train.yaml", cwd=project)
    assert f"Resuming the run {path.name} (lost)" in again.stdout
    assert hookline.open_run(path).status == "completed"
    once_more = run_hookline(
        "train", "train.yaml", "--resume", path.name, "trainer.max_epochs=3", cwd=project
    )
    assert once_more.returncode == 0, once_more.stderr
    assert "Resuming from " in once_more.stdout
    assert hookline.open_run(path).overview()["steps"] == 12
    unknown = run_hookline("train", "train.yaml", "--resume=2020", cwd=project)
    assert unknown.returncode == 1
    assert "There is no run '2020'" in unknown.stderr


def test_a_run_without_a_checkpoint_is_told_when_there_is_nothing_to_resume(project: Path) -> None:
    hooks = "hooks=[{name: early_stopping, monitor: val/los}]"
    assert run_hookline("train", "train.yaml", hooks, cwd=project).returncode == 1
    again = run_hookline("train", "train.yaml", hooks, "--resume", cwd=project)
    said = (
        "In runs, 1 unfinished run has this configuration, but no checkpoint to resume from. "
        "Starting a new run."
    )
    assert said in again.stdout.splitlines()


def test_a_reader_that_has_seen_enough_ends_the_output_and_not_the_training(project: Path) -> None:
    command = " ".join([*HOOKLINE, "train", "train.yaml", "hooks.1=console_log"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=project,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = runs_in(project)
    opened = hookline.open_run(path)
    assert (opened.status, opened.overview()["steps"]) == ("completed", 8)
    assert opened.events("end")[0]["hooks"]["hooks"][1]["failures"] == 0


def test_train_from_python(project: Path) -> None:
    done = run_hookline("train", "net.py:make_trainer", "steps=2", "lr=0.5", cwd=project)
    assert done.returncode == 0, done.stderr
    (path,) = runs_in(project)
    assert hookline.open_run(path).overview()["steps"] == 2
    config = hookline.open_run(path).manifest["config"]
    assert config["python"] == {
        "function": "net:make_trainer",
        "arguments": {"steps": 2, "lr": 0.5},
    }


def test_check_shows_what_would_be_trained_and_trains_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(project.iterdir())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    done = run_in_process("check", "train.yaml", cwd=project)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:-1])
    assert lines["model"] == "Net, 43 parameters"
    assert lines["train"].startswith("4 batches, the first: tuple(Tensor[2, 8] of float32")
    assert lines["backward"] == "reaches 4 of 4 tensors"
    assert lines["optimizer"] == "SGD"
    assert lines["hooks"].startswith("saves, early_stopping (disabled)")
    assert lines["length"] == "2 epochs"
    assert done.stdout.splitlines()[-1] == "OK"
    assert sorted(project.iterdir()) == before


def test_check_answers_programs(project: Path) -> None:
    done = run_in_process("check", "train.yaml", "--json", cwd=project)
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["ok"] is True
    assert facts["train"]["loss"] > 0
    assert facts["val"]["batches"] == 4
    bad = run_in_process(
        "check", "train.yaml", "--json", "model.init_args.widht=3", "trainer.seed=1", cwd=project
    )
    assert bad.returncode == 1
    said = json.loads(bad.stdout)
    assert said["ok"] is False
    assert [one["key"] for one in said["problems"]] == ["model.init_args.widht", "trainer.seed"]


@pytest.mark.parametrize("command", ["check", "train"])
def test_mistakes_are_a_message_with_their_places(project: Path, command: str) -> None:
    (project / "bad.yaml").write_text(TRAINING.replace("width", "widht").replace("lr:", "rate:"))
    done = run_in_process(command, "bad.yaml", cwd=project)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "hookline: 2 problems:"
    assert "bad.yaml:2: model.init_args.widht: Net has no argument 'widht'. Did you" in done.stderr
    assert "bad.yaml:4: optimizer.init_args.rate: SGD has no argument 'rate'" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_finds_a_batch_that_does_not_fit_the_model(project: Path) -> None:
    done = run_in_process(
        "check",
        "train.yaml",
        "model={class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 4}}",
        cwd=project,
    )
    assert done.returncode == 1
    assert "With a batch of data.train, tuple(Tensor[2, 8] of float32" in done.stderr
    assert "RuntimeError" in done.stderr
    assert len(done.stderr.splitlines()) == 1


NOISY = """
import random
import torch

class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.rng = random.Random(0)
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((8,), self.rng.random()), torch.ones(4)
"""
NOISY_DATA = "data.train={class_path: noisy.Noisy, loader: {batch_size: 2, num_workers: 1}}"


def test_check_finds_silent_bugs_that_a_batch_shows(project: Path) -> None:
    (project / "noisy.py").write_text(NOISY)
    done = run_hookline("check", "train.yaml", NOISY_DATA, cwd=project)
    assert done.returncode == 1
    assert "Lint: error workers-share-random-numbers at step 1: DataLoader of Noisy" in done.stderr
    assert "    Fix: Make the generator in each worker" in done.stderr
    assert "findings   1\n" in done.stdout
    assert "OK" not in done.stdout.splitlines()
    ignored = "hooks=[{name: lint, ignore: [workers-share-random-numbers]}]"
    done = run_in_process("check", "train.yaml", NOISY_DATA, ignored, cwd=project)
    assert (done.returncode, done.stderr) == (0, "")


HOOK = "hooks.1={name: early_stopping, monitor: val/los}"


def test_a_metric_that_is_missing_in_training_is_said_once_and_without_a_traceback(
    project: Path,
) -> None:
    done = run_hookline("train", "train.yaml", HOOK, cwd=project)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("monitors the metric 'val/los'") == 1
    assert done.stderr.startswith("hookline: The hook 'early_stopping' failed")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("runs", ["net.py/runs"])
def test_a_folder_that_runs_cannot_be_written_to_is_bad_input(
    project: Path, command: str, runs: str
) -> None:
    done = run_in_process(command, "train.yaml", f"trainer.runs={runs}", cwd=project)
    assert done.returncode == 2
    assert f"'trainer.runs': '{runs}' " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_schema_is_printed_or_written(project: Path) -> None:
    printed = run_in_process("schema", cwd=project)
    assert json.loads(printed.stdout)["title"] == "Hookline config file"
    written = run_in_process("schema", "--out", "train.schema.json", cwd=project)
    assert written.stdout == "train.schema.json\n"
    assert (project / "train.schema.json").read_text() == printed.stdout
