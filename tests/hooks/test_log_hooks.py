"""What LoggingHook, ConsoleLogHook and JSONLogHook write of a training."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from loops import batches, fit, make
from loops import train as run_loop
from torch.nn import functional as F

import hookline
from hookline.context import LazyFloat
from hookline.hooks.monitoring.console_log import ConsoleLogHook
from hookline.hooks.monitoring.json_log import JSONLogHook
from hookline.hooks.monitoring.logging_hook import LoggingHook
from hookline.runs.jsonl_reader import read_records


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


def test_the_level_of_log_lines_can_be_chosen(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    train(tmp_path, LoggingHook(level="WARNING"))
    assert {level for level, _ in lines(caplog)} == {"WARNING"}


def test_an_exception_is_logged_as_an_error_with_its_type_and_text(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    strict = {"hooks": {"settings": {"isolate": False}}}
    with pytest.raises(ValueError, match="out of luck"):
        train(tmp_path, Fails(), LoggingHook(), **strict)
    said = lines(caplog)
    assert ("ERROR", "Training fails at step 2: ValueError: out of luck") in said
    assert said[-1][1].startswith("Training ends: error at step 2")


def test_a_resumed_training_says_where_it_goes_on(tmp_path, caplog):
    first = train(tmp_path, Saves())
    caplog.set_level(logging.INFO)
    train(tmp_path, LoggingHook(), resume_from=first.run.path, max_epochs=2)
    texts = [text for _, text in lines(caplog)]
    assert texts[0].startswith("Training starts after step 4: Net")
    assert texts[1].startswith("Restored step 4 from ")


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


def test_the_console_shows_every_tenth_batch_unless_told_otherwise(tmp_path, capsys):
    train(tmp_path, ConsoleLogHook(), data=batches(21))
    out = capsys.readouterr().out
    assert [f"batch {n} " in out for n in (1, 2, 10, 11, 12, 21)] == [1, 0, 0, 1, 0, 1]


def test_the_average_is_that_of_the_losses_since_the_last_line(capsys):
    hook = ConsoleLogHook(log_every_n_batches=2)
    for i, loss in enumerate((1.0, 2.0, 4.0)):
        hook.on_train_batch_end(i, "train", i + 1, loss, epoch=0)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("loss 1.0000  average 1.0000")
    assert second.endswith("loss 4.0000  average 3.0000")


def test_the_average_leaves_out_what_a_line_of_another_loader_had(capsys):
    hook = ConsoleLogHook(log_every_n_batches=4)
    hook.on_train_batch_end(0, "wiki", 1, 1.0, epoch=0)
    hook.on_train_batch_end(0, "code", 2, 3.0, epoch=0)
    assert capsys.readouterr().out.splitlines()[1].endswith("loss 3.0000  average 3.0000")


def test_the_console_names_a_loader_that_has_a_name(tmp_path, capsys):
    train(tmp_path, ConsoleLogHook(), data={"wiki": batches(1), "code": batches(1)})
    out = capsys.readouterr().out
    assert "epoch 1  wiki batch 1  step 1" in out
    assert "epoch 1  code batch 1  step 2" in out


def test_the_console_reads_losses_only_when_it_prints(capsys):
    read = []
    hook = ConsoleLogHook(log_every_n_batches=10)
    for i in range(1, 10):
        hook.on_train_batch_end(i, "train", i, LazyFloat(lambda i=i: read.append(i) or 0.5))
    assert read == []
    hook.on_train_batch_end(10, "train", 10, 0.5)
    assert sorted(read) == list(range(1, 10))


def test_console_lines_do_not_tear_a_progress_bar(tmp_path, monkeypatch):
    with terminal() as (stream, shown):
        monkeypatch.setattr(sys, "stdout", stream)
        train(tmp_path, ConsoleLogHook(1), data=batches(3), progress="bar")
        monkeypatch.undo()
    for n in (1, 2, 3):  # each on a line of its own: nothing before it, a line feed after it
        line = next(text for text in shown().split("\r\n") if f"batch {n}  step {n}" in text)
        assert line.split("\x1b[2K")[-1].startswith("epoch 1  batch")
        assert line.rsplit("average ", 1)[1].replace(".", "").isdigit()


@contextmanager
def terminal():
    """Give a stream that is a real terminal, and what it shows, to be asked for afterwards."""
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    chunks = []

    def read():
        with suppress(OSError):  # how Linux says that the other side is closed
            while chunk := os.read(parent, 65536):
                chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(child, "w") as stream:
            yield stream, lambda: b"".join(chunks).decode()
    finally:
        reader.join()
        os.close(parent)


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


def test_json_writes_every_hundredth_batch_unless_told_otherwise(tmp_path):
    trainer = train(tmp_path, JSONLogHook(), data=batches(1) * 201)
    written = records(trainer.run.path / "log.jsonl")
    assert [record.get("batch") for record in written if "loss" in record] == [0, 100, 200]


def test_json_reads_only_the_losses_that_it_writes(tmp_path):
    read = []
    hook = JSONLogHook(log_every_n_batches=3, path=tmp_path / "log.jsonl")
    for i in range(7):
        hook.on_train_batch_end(None, i, "train", i, LazyFloat(lambda i=i: read.append(i) or 1))
    assert read == [0, 3, 6]


def test_json_goes_where_the_path_says(tmp_path):
    path = tmp_path / "new" / "my.jsonl"
    trainer = train(tmp_path, JSONLogHook(path=str(path)))
    assert records(path)[-1]["event"] == "train_end"
    assert not (trainer.run.path / "log.jsonl").exists()


def test_without_a_run_json_goes_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tmp_path, JSONLogHook(), runs=None)
    assert records("log.jsonl")[0]["event"] == "train_start"


def test_values_that_json_does_not_have_are_written_all_the_same(tmp_path):
    class Odd(hookline.Hook):
        def on_epoch_end(self, metrics):
            metrics["nan"] = float("nan")
            metrics["less"] = -float("inf")
            metrics["thing"] = {1, 2}.union
            metrics["tensor"] = torch.zeros(2)

    trainer = train(tmp_path, Odd(), JSONLogHook())
    metrics = records(trainer.run.path / "log.jsonl")[-2]["metrics"]
    assert (metrics["nan"], metrics["less"]) == ("NaN", "-Infinity")
    assert metrics["thing"].startswith("<built-in method union")
    assert metrics["tensor"] == "tensor([0., 0.])"


def test_json_writes_down_what_went_wrong(tmp_path):
    hook = JSONLogHook(path=tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="out of luck"):
        train(tmp_path, Fails(), hook, hooks={"settings": {"isolate": False}})
    *_, failure, end = records(tmp_path / "log.jsonl")
    assert (failure["event"], failure["error"]) == ("exception", "ValueError: out of luck")
    assert end["status"] == "error"


def test_a_resumed_run_appends_to_the_lines_before_its_checkpoint(tmp_path):
    first = train(tmp_path, Saves(), JSONLogHook())
    before = records(first.run.path / "log.jsonl")
    again = train(tmp_path, JSONLogHook(), resume_from=first.run.path, max_epochs=2)
    assert again.run.path == first.run.path
    after = records(first.run.path / "log.jsonl")
    moved = records(first.run.path / "log.repeated.jsonl")
    assert [line["event"] for line in moved] == ["checkpoint_save", "train_end"]
    kept = len(before) - len(moved)
    assert after[:kept] + moved == before
    assert (after[kept]["event"], after[kept]["step"]) == ("train_start", 4)


def test_a_hook_that_is_added_while_training_writes_from_then_on(tmp_path):
    class AddsLater(hookline.Hook):
        def on_step_end(self, trainer, step):
            if step == 2:
                trainer.add_hook(JSONLogHook(log_every_n_batches=1))

    trainer = train(tmp_path, AddsLater())
    assert [r["event"] for r in records(trainer.run.path / "log.jsonl")] == [
        "train_batch_end",
        "train_batch_end",
        "epoch_end",
        "train_end",
    ]


def test_a_file_that_cannot_be_opened_is_told_once_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "taken").write_text("a file")
    hook = JSONLogHook(log_every_n_batches=1, path=tmp_path / "taken" / "log.jsonl")
    trainer = train(tmp_path, hook)
    assert trainer.status == "completed"
    assert trainer.hooks.describe()[0].failures == 1
    assert "taken" in caplog.text


KILLED = """
    import sys, torch, hookline
    from hookline.hooks.monitoring.json_log import JSONLogHook

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(3, 2), torch.ones(3, 1)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = hookline.TrainerConfig(runs=None, progress="off")
    hook = JSONLogHook(log_every_n_batches=1, path="log.jsonl")
    hookline.Trainer(config, model, optimizer, hooks=[hook]).fit(Endless())
"""


def test_after_a_kill_every_line_is_whole_and_the_next_writer_mends_a_torn_one(tmp_path):
    path = tmp_path / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED)], cwd=tmp_path)
    try:
        while process.poll() is None and (not path.exists() or path.stat().st_size < 50_000):
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    *complete, rest = path.read_bytes().split(b"\n")
    assert len(complete) > 100
    assert all(json.loads(line)["event"] for line in complete)
    if not rest:  # a kill hardly ever comes within a system call: cut the last line ourselves
        with path.open("rb+") as file:
            file.truncate(path.stat().st_size - 20)
    whole = len(list(read_records(path)))
    train(tmp_path, JSONLogHook(path=path, log_every_n_batches=1))
    assert [record["event"] for record in read_records(path)][whole:] == [
        "train_start",
        *["train_batch_end"] * 4,
        "epoch_end",
        "train_end",
    ]


# -- all of them -----------------------------------------------------------------------------------


def test_they_work_in_a_bare_loop(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    model, optimizer = make()
    json_log = JSONLogHook(path=tmp_path / "log.jsonl", log_every_n_batches=1)
    hooks = [LoggingHook(), ConsoleLogHook(1), json_log]
    with hookline.attach(model, optimizer, hooks=hooks) as session:
        with session.epoch():
            for x, y in session.batches(batches(2)):
                optimizer.zero_grad()
                session.backward(F.mse_loss(model(x), y))
                optimizer.step()
        with session.validation():
            session.log("loss", 0.25)
    assert "epoch 1  batch 2  step 2  loss " in capsys.readouterr().out
    assert [record["event"] for record in records(tmp_path / "log.jsonl")] == [
        "train_start",
        "train_batch_end",
        "train_batch_end",
        "epoch_end",
        "validation_end",
        "train_end",
    ]
    texts = [text for _, text in lines(caplog)]
    assert "Validation at step 2: val/loss 0.2500" in texts


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


def test_the_same_hooks_may_run_in_another_loop(tmp_path, capsys):
    hook = ConsoleLogHook(1)
    train(tmp_path, hook, data=batches(1))
    model, optimizer = make()
    capsys.readouterr()
    with hookline.attach(model, optimizer, hooks=[hook]):
        run_loop(model, optimizer, batches(1))
    assert capsys.readouterr().out.startswith("step 1  loss ")


def test_their_names(tmp_path):
    manager = hookline.HookManager()
    names = [manager.add_hook(hook) for hook in (LoggingHook(), ConsoleLogHook(), JSONLogHook())]
    assert names == ["logging", "console_log", "json_log"]
