"""LoggingHook, ConsoleLogHook and JSONLogHook: what they write of a training run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from loops import batches, fit, make
from loops import train as run_loop

import hookline
from hookline.context import LazyFloat
from hookline.hooks.monitoring.console_log import ConsoleLogHook
from hookline.hooks.monitoring.json_log import JSONLogHook
from hookline.hooks.monitoring.logging_hook import LoggingHook


def train(tmp_path, *hooks, **options):
    return fit(*hooks, **{"runs": tmp_path / "runs"} | options)


class Saves(hookline.Hook):
    def on_epoch_end(self, trainer):
        trainer.save_checkpoint()


class Fails(hookline.Hook):
    def on_step_end(self, step):
        if step == 2:
            raise ValueError("out of luck")


# -- logging ---------------------------------------------------------------------------------------


def lines(caplog):
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "hookline.training"]


def test_logging_tells_start_epochs_validation_checkpoints_and_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    at_once = {"checkpoints": {"background": False}}
    val = batches(2, seed=2)
    trainer = train(tmp_path, Saves(), LoggingHook(), val=val, max_epochs=2, **at_once)
    said = lines(caplog)
    assert {level for level, _ in said} == {"INFO"}
    texts = [text for _, text in said]
    assert texts[0] == f"Training starts: Net with 212 parameters, in {trainer.run.path}"
    assert texts[1].startswith("Validation at step 4: val/loss ")
    assert texts[2].startswith("Epoch 0 ends at step 4: train/loss ")
    assert "val/loss" in texts[2]
    assert texts[3].startswith("Checkpoint of step 4: ")
    assert texts[5].startswith("Epoch 1 ends at step 8")
    assert texts[-1].startswith("Training ends: completed at step 8 in 0:00:")


def test_an_exception_is_logged_as_an_error_with_its_type_and_text(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    strict = {"hooks": {"settings": {"isolate": False}}}
    with pytest.raises(ValueError, match="out of luck"):
        train(tmp_path, Fails(), LoggingHook(), **strict)
    said = lines(caplog)
    assert ("ERROR", "Training fails at step 2: ValueError: out of luck") in said
    assert said[-1][1].startswith("Training ends: error at step 2")


def test_metrics_are_not_read_when_nobody_hears_the_log(caplog):
    read = []
    caplog.set_level(logging.ERROR)
    metrics = hookline.context.Metrics({"val/loss": LazyFloat(lambda: read.append(1) or 0.5)})
    LoggingHook().on_validation_end(step=1, metrics=metrics)
    assert read == []


def test_a_program_without_logging_sees_the_lines_on_stderr_and_stays_as_it_was(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(logging.root, "handlers", [])
    train(tmp_path, LoggingHook())
    shown = capsys.readouterr().err
    assert "INFO Training starts: Net with 212 parameters" in shown
    assert "INFO Training ends: completed at step 4" in shown
    logger = logging.getLogger("hookline.training")
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)


def test_a_program_without_logging_sees_neither_secrets_nor_control_characters(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setenv("API_TOKEN", "correct-horse-battery")
    LoggingHook().on_exception(ValueError("correct-horse-battery\x1b[31m"), 1)
    shown = capsys.readouterr().err
    assert "ERROR Training fails at step 1: ValueError: ***" in shown
    assert "\x1b" not in shown


# -- console ---------------------------------------------------------------------------------------


def test_the_console_shows_every_nth_batch_the_epochs_and_the_end(tmp_path, capsys):
    hook = ConsoleLogHook(log_every_n_batches=3)
    train(tmp_path, hook, data=batches(7), val=batches(1), max_epochs=2)
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  loss")[0] for line in out if "average" in line] == [
        f"epoch {epoch}  batch {batch}  step {step}"
        for epoch, first in ((1, 0), (2, 7))
        for batch, step in ((1, first + 1), (4, first + 4), (7, first + 7))
    ]
    assert [line.split(":")[0] for line in out if "average" not in line] == [
        "validation at step 7",
        "epoch 1 ends",
        "validation at step 14",
        "epoch 2 ends",
        "training ends at step 14",
    ]
    assert out[-1] == "training ends at step 14: completed"


# -- JSON lines ------------------------------------------------------------------------------------


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_json_lines_have_timestamp_event_epoch_batch_step_and_loss(tmp_path):
    hook = JSONLogHook(log_every_n_batches=2)
    trainer = train(tmp_path, Saves(), hook, data=batches(5), val=batches(1))
    written = records(trainer.run.path / "log.jsonl")
    assert [record["event"] for record in written] == [
        "train_start",
        *["train_batch_end"] * 3,
        "validation_end",
        "epoch_end",
        "checkpoint_save",
        "train_end",
    ]
    assert all(record["timestamp"].endswith("+00:00") for record in written)
    batch = written[2]
    assert {name: batch[name] for name in ("epoch", "batch", "step", "loader")} == {
        "epoch": 0,
        "batch": 2,
        "step": 3,
        "loader": "train",
    }
    assert isinstance(batch["loss"], float)
    assert written[4]["metrics"].keys() >= {"val/loss"}
    assert written[5]["metrics"].keys() >= {"train/loss", "val/loss"}
    assert written[6]["path"].startswith(str(trainer.run.path))
    assert written[7]["status"] == "completed"


def test_json_writes_down_what_went_wrong(tmp_path):
    hook = JSONLogHook(path=tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="out of luck"):
        train(tmp_path, Fails(), hook, hooks={"settings": {"isolate": False}})
    *_, failure, end = records(tmp_path / "log.jsonl")
    assert (failure["event"], failure["error"]) == ("exception", "ValueError: out of luck")
    assert end["status"] == "error"


# -- all of them -----------------------------------------------------------------------------------


def test_they_work_in_an_unchanged_bare_loop(tmp_path, capsys):
    model, optimizer = make()
    json_log = JSONLogHook(path=tmp_path / "log.jsonl", log_every_n_batches=2)
    hooks = [ConsoleLogHook(2), json_log]
    with hookline.attach(model, optimizer, hooks=hooks) as session:
        losses = run_loop(model, optimizer, batches(3))
    assert session.hooks.summary().failures == {}
    shown = capsys.readouterr().out.splitlines()
    average = sum(losses[1:]) / 2
    assert shown == [
        f"step 1  loss {losses[0]:.4f}  average {losses[0]:.4f}",
        f"step 3  loss {losses[2]:.4f}  average {average:.4f}",
        "training ends at step 3: completed",
    ]
    written = records(tmp_path / "log.jsonl")
    steps = [(record["step"], record["loss"]) for record in written if "loss" in record]
    assert steps == [(1, losses[0]), (3, losses[2])]
    assert [record["event"] for record in written] == [
        "train_start",
        "step_end",
        "step_end",
        "train_end",
    ]
