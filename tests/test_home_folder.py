"""`~` in paths stands for the home folder, and no folder of that name is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import call_hookline
from loops import batches, make, train
from torch.nn import functional as F

import hookline
from hookline.checkpoint.export import export_weights

CONFIG = """
model: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 1}}
data: {train: net.batches}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 1, runs: ~/runs, progress: off}
"""
NET = """
import torch
def batches():
    return [(torch.ones(3, 2), torch.ones(3, 1))] * 2
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder, work = tmp_path / "home", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.chdir(work)
    yield folder
    assert [path.name for path in work.iterdir() if path.name.startswith("~")] == []


def fit(*hooks: hookline.Hook, **options: Any) -> hookline.Trainer:
    config = hookline.TrainerConfig(**{"runs": "~/runs", "progress": "off"} | options)
    trainer = hookline.Trainer(config, *make(), loss_fn=F.mse_loss, hooks=list(hooks))
    return trainer.fit(batches(2))


def test_the_trainer_and_its_hooks_write_into_the_home_folder(home: Path) -> None:
    trainer = fit(
        hookline.ModelCheckpoint(folder="~/best"),
        hookline.JSONLogHook(path="~/log.jsonl"),
        hookline.Heartbeat(path="~/heartbeat.json"),
        hookline.UploadHook("~/copies"),
    )
    trainer.save_checkpoint("~/saved")
    (run,) = (home / "runs").iterdir()
    assert trainer.run.path == run
    names = {"best", "log.jsonl", "heartbeat.json", "copies", "saved", "last", "runs"}
    assert {path.name for path in home.iterdir()} == names
    config = hookline.TrainerConfig(runs="~/runs", progress="off", max_steps=3)
    again = hookline.Trainer(config, *make(), loss_fn=F.mse_loss)
    assert again.fit(batches(3), resume_from="~/saved").step == 3


def test_a_bare_loop_writes_into_the_home_folder(home: Path) -> None:
    model, optimizer = make()
    with hookline.attach(model, optimizer, runs="~/runs", trackers=[]) as session:
        train(model, optimizer, batches(2))
        session.save_checkpoint("~/saved", wait=True)
    assert session.run.path.parent == home / "runs"
    with hookline.attach(model, optimizer, runs=None) as session:
        assert session.load_checkpoint("~/saved").step == 2


def test_runs_and_checkpoints_are_read_from_the_home_folder(home: Path) -> None:
    run = fit(hookline.ModelCheckpoint()).run
    assert hookline.open_run(f"~/runs/{run.id}").id == run.id
    assert hookline.open_run(run.id, runs="~/runs").id == run.id
    checkpoint = hookline.get_last_checkpoint("~/runs")
    assert checkpoint is not None
    name = f"~/{checkpoint.relative_to(home)}"
    assert export_weights(Path(name), Path("~/weights.safetensors")).path.parent == home
    hookline.make_report(run.id, folder="~/runs").write("~/report.html")
    assert (home / "report.html").exists()


def test_options_and_config_files_may_name_the_home_folder(home: Path) -> None:
    Path("net.py").write_text(NET)
    (home / "train.yaml").write_text(CONFIG)
    code, printed = call_hookline("train", "~/train.yaml")
    assert code == 0, printed
    (run,) = (home / "runs").iterdir()
    for command in (
        ["runs", "--runs=~/runs"],
        ["runs", "show", run.name, "--runs=~/runs"],
        ["runs", "show", f"~/runs/{run.name}"],
        ["checkpoints", "list", f"~/runs/{run.name}"],
        ["report", run.name, "--runs=~/runs", "--out=~/report.html"],
        ["init", "~/project"],
        ["schema", "--out=~/schema.json"],
        ["demo", "--steps=1", "--out=~/demo"],
    ):
        code, printed = call_hookline(*command)
        assert code == 0, (command, printed)
    expected = {"train.yaml", "runs", "report.html", "project", "schema.json", "demo"}
    assert {path.name for path in home.iterdir()} == expected
    assert json.loads((home / "schema.json").read_text())
