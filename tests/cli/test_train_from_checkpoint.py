"""`hookline train` with `--resume` and `--from`, and its exit codes, in real processes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from commands import ENVIRONMENT, HOOKLINE, run_hookline

import hookline
from hookline.cli.app import app

PROJECT = """
import os, torch
from torch import nn
import hookline

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 4), nn.Dropout(0.2)
    def forward(self, x):
        return self.layer(self.drop(x))

def batches(count: int = 4):
    return [(torch.ones(2, 8), torch.ones(2, 4)) for _ in range(count)]

class Saves(hookline.Hook):
    def on_step_end(self, trainer, step):
        trainer.save_checkpoint()
        if step == int(os.environ.get("INTERRUPT_AT", -1)):
            raise KeyboardInterrupt

class Preempted(hookline.Trainer):
    stop_signal = os.environ.get("SIGNAL", "SIGTERM")
    def fit(self, *args, **kwargs):
        super().fit(*args, **kwargs)
        self.loop.context.status = "preempted"
        return self

def make_trainer(lr=0.1):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Preempted({"max_steps": 3}, model, optimizer, hooks=[Saves()]), batches()
"""

TRAINING = """\
seed: 0
model: net.Net
data: {train: net.batches}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 1, progress: plain}
hooks: [net.Saves]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(PROJECT)
    (tmp_path / "train.yaml").write_text(TRAINING)
    return tmp_path


def runs_in(project: Path) -> list[Path]:
    return sorted((project / "runs").iterdir())


def test_a_fork_is_a_new_run_with_its_parent_and_resumes_by_itself(project: Path) -> None:
    assert run_hookline("train", "train.yaml", cwd=project).returncode == 0
    (parent,) = runs_in(project)
    changed = ["trainer.max_epochs=2", "optimizer.init_args.lr=0.05"]
    fork = ["train", "train.yaml", *changed, "--from", f"{parent.name}@2"]

    stopped = run_hookline(*fork, "--resume", cwd=project, INTERRUPT_AT="5")
    assert stopped.returncode == 130
    assert "no unfinished run of this configuration" in stopped.stdout
    assert "optimizers.0.groups.0.lr is 0.05 instead of 0.1" in stopped.stdout
    (path,) = [path for path in runs_in(project) if path != parent]
    manifest = hookline.open_run(path).manifest
    assert manifest["parent"] == {"run_id": parent.name, "checkpoint": "step_000002", "step": 2}
    hint = f"hookline train train.yaml {shlex.join(changed)} --resume {path.name}"
    assert stopped.stderr.endswith(f"hookline: Interrupted. To resume: {hint}\n")

    again = run_hookline(*fork, "--resume", cwd=project)
    assert again.returncode == 0, again.stderr
    assert f"Resuming the run {path.name} (interrupted)" in again.stdout
    assert len(runs_in(project)) == 2
    opened = hookline.open_run(path)
    assert opened.overview()["steps"] == 8
    assert [row["step"] for row in opened.metrics("train/loss")] == [3, 4, 5, 6, 7, 8]
    assert opened.manifest["parent"]["run_id"] == parent.name

    unknown = run_hookline(
        "train", "train.yaml", "--from", f"runs/{parent.name}@7", "trainer.max_epochs=2",
        cwd=project,
    )  # fmt: skip
    assert unknown.returncode == 1
    assert "has no checkpoint of step 7. It has '1', '2', '3', '4'." in unknown.stderr
    with pytest.raises(typer.BadParameter, match="a run is given to --resume and to --from"):
        app(["train", "train.yaml", "--from=x", "--resume=y"], standalone_mode=False)


def test_the_command_that_resumes_is_quoted_and_falls_back_from_a_damaged_checkpoint(
    project: Path,
) -> None:
    override = "hooks=[{name: net.Saves}, {name: lr_monitor}]"
    done = run_hookline("train", "train.yaml", override, cwd=project, INTERRUPT_AT="3")
    assert done.returncode == 130
    (path,) = runs_in(project)
    newest = path / "checkpoints" / (path / "checkpoints" / "last").read_text().strip()
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    command = done.stderr.partition("To resume: hookline ")[2]
    again = subprocess.run(
        ["bash", "-c", f"{shlex.join(HOOKLINE)} {command}"],
        cwd=project, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "model.safetensors" in again.stderr
    assert newest.name in again.stderr
    assert "Resuming from" in again.stdout
    assert newest.name not in again.stdout.partition("Resuming from")[2].partition("\n")[0]
    assert hookline.open_run(path).status == "completed"


def test_a_preempted_run_exits_as_the_signal_would(project: Path) -> None:
    done = run_hookline("train", "net.py:make_trainer", "lr=0.2", cwd=project, SIGNAL="SIGTERM")
    assert done.returncode == 143
    (path,) = runs_in(project)
    assert done.stderr == (
        "hookline: Preempted by SIGTERM after step 3. To resume: hookline train "
        f"net.py:make_trainer lr=0.2 --resume {path.name}\n"
    )
