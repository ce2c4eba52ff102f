"""The folder of a run: deleted while training, and forked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import batches, make
from torch.nn import functional as F

import hookline
from hookline.runs import Run, open_run
from hookline.runs.restart import find_unfinished_run


class Deletes(hookline.Hook):
    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 3:
            trainer.run.flush()
            shutil.rmtree(trainer.run.path)


def test_a_run_folder_that_is_deleted_is_reported_and_not_created_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = hookline.TrainerConfig(runs=tmp_path, progress="plain", max_epochs=2)
    trainer = hookline.Trainer(config, *make(), loss_fn=F.mse_loss, hooks=[Deletes()])
    trainer.fit(batches(4))
    assert trainer.step == 8  # training went on
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    for name in ("metrics.jsonl", "events.jsonl"):
        file = trainer.run.path / name
        problem = f"Cannot write {file}: the file was deleted. Training continues without it."
        assert errors.count(problem) == 1
    assert (
        f"{trainer.run.path} was deleted or moved: 8 records were lost" in capsys.readouterr().out
    )
    assert not list(tmp_path.iterdir())


def test_a_fork_names_its_parent(tmp_path: Path) -> None:
    parent = {"run_id": "20261115-210655-3f9c7b", "checkpoint": "step_000004", "step": 4}
    torch.manual_seed(0)
    plain, fork = (
        Run.create(tmp_path, config={}, seed=0, hooks=[], parent=p) for p in (None, parent)
    )
    for run in (plain, fork):
        run.close()
    opened = open_run(fork.path)
    assert opened.manifest["parent"] == parent
    assert "forked from  run 20261115-210655-3f9c7b at step 4" in str(opened)
    differences = hookline.runs.diff_runs(open_run(plain.path), opened)["config"]
    assert differences["parent.run_id"] == [None, parent["run_id"]]
    assert "forked" not in str(open_run(plain.path))


def test_what_depends_on_the_clock_is_no_difference_of_results(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, config={}, seed=0, hooks=[]) for _ in range(2)]
    for value, run in enumerate(runs):
        for name in ("train/tokens_per_second", "time/data", "system/memory_mb", "train/loss"):
            run.log(1, 0, name, float(value))
        run.close()
    results = hookline.runs.diff_runs(*(open_run(run.path) for run in runs))["results"]
    assert set(results) == {"train/loss (last)", "train/loss (best)"}


def test_a_run_with_other_settings_of_the_same_name_is_not_continued(tmp_path: Path) -> None:
    """The configuration and the training both have `loaders`."""
    training = {"loaders": {"train": {"length": 3}}}
    config = {"loaders": {"order": "round_robin"}}
    run = Run.create(tmp_path, config=config, seed=0, hooks=[], training=training)
    run.close("interrupted")
    here = {"config": {"loaders": {"order": "weighted"}}, "training": training, "hooks": []}
    _, message = find_unfinished_run(tmp_path, here)
    assert "loaders.order is 'weighted' here, 'round_robin' there" in message
    _, message = find_unfinished_run(tmp_path, {**here, "config": config})
    assert "1 unfinished run has this configuration, but no checkpoint" in message
