"""A run that fails in the same way after the same checkpoint is not resumed for ever."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import batches, make
from torch.nn import functional as F

import hookline
from hookline.errors import RunError
from hookline.runs import Run, open_run
from hookline.runs.restart import check_crash_loop


class Fails(hookline.Hook):
    critical = True

    def __init__(self, at: int, message: str = "out of range", saves: tuple[int, ...] = ()) -> None:
        self.at, self.message, self.saves = at, message, saves

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step in self.saves:
            trainer.save_checkpoint()
        if step == self.at:
            raise ValueError(self.message)


def fail(runs: Path, hook: Fails, resume_from: Any = None) -> Path:
    config = hookline.TrainerConfig(runs=runs, progress="off", seed=3, max_epochs=2)
    trainer = hookline.Trainer(config, *make(), loss_fn=F.mse_loss, hooks=[hook])
    with pytest.raises(hookline.HooklineError, match=hook.message[:3]):
        trainer.fit(batches(4), resume_from=resume_from)
    path: Path = trainer.run.path
    return path


def test_the_same_failure_twice_after_a_checkpoint_names_an_older_one(tmp_path: Path) -> None:
    # The part that saved the checkpoint counts, too.
    path = fail(tmp_path, Fails(6, "object at 0x7f01 in process 12", saves=(2, 4)))
    last, older = (path / "checkpoints" / name for name in ("step_000004", "step_000002"))
    check_crash_loop(path, last)  # once
    fail(tmp_path, Fails(6, "object at 0x7f02 in process 345"), last)
    with pytest.raises(RunError) as caught:
        check_crash_loop(path, last)
    message = str(caught.value)
    assert "object at 0x7f02 in process 345" in message
    assert f"the checkpoint {last}, in or after step 5" in message
    assert f"hookline train CONFIG --resume {older}\n" in message
    check_crash_loop(path, older)
    parts = open_run(path).manifest["attempts"]
    assert [part["number"] for part in parts] == [1, 2]
    assert [part["resumed_from"] for part in parts] == [None, last.name]
    assert parts[1]["error"]["step"] == 5
    assert [part["error"]["checkpoint"] for part in parts] == [last.name, last.name]
    shutil.rmtree(older)
    with pytest.raises(RunError, match="There is no older checkpoint"):
        check_crash_loop(path, last)


@pytest.mark.parametrize(
    "second", [Fails(5, "bad"), Fails(6, "another")], ids=["another step", "another message"]
)
def test_different_failures_are_no_crash_loop(tmp_path: Path, second: Fails) -> None:
    path = fail(tmp_path, Fails(6, "bad", saves=(2,)))
    checkpoint = path / "checkpoints" / "step_000002"
    fail(tmp_path, second, checkpoint)
    check_crash_loop(path, checkpoint)


def test_interruptions_are_no_failures(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    for status in ("interrupted", "preempted", "interrupted"):
        run.close(status, error=KeyboardInterrupt())
        run = Run.open(run.path, resume=True, resumed_from="step_000002")
    run.close()
    check_crash_loop(run.path, run.checkpoints / "step_000002")


# -- a folder that is deleted while training ------------------------------------------------------


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


# -- forks ----------------------------------------------------------------------------------------


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
