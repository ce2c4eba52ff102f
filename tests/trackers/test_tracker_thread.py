"""Trackers that are slow, dead or failing, and where trackers can be given."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import hookline
from hookline import Hook, Trainer, TrainerConfig
from hookline.errors import ArgumentError, ConfigError
from hookline.runs.jsonl_reader import read_records
from hookline.runs.run import Run
from hookline.trackers import Tracker
from hookline.trackers.group import TrackerSet
from hookline.trackers.names import BUILT_IN_TRACKERS, make_trackers
from hookline.trackers.protocol import RefusedValues, log_each

BATCHES = [(torch.ones(1, 2), torch.ones(1, 1))] * 6


class Kept:
    """A tracker that keeps what it gets."""

    name = "kept"

    def __init__(self):
        self.values, self.calls, self.run = [], [], None

    def start(self, run):
        self.run = run
        self.calls.append("start")
        return {"id": "one"}

    def log(self, values):
        self.values += values

    def log_checkpoint(self, path, step):
        self.calls.append(("checkpoint", path.name, step))

    def finish(self, status):
        self.calls.append(status)

    def steps(self, name="train/loss"):
        return [value.step for value in self.values if value.name == name]


class Stuck(Kept):
    """A tracker that never returns from its first call."""

    name = "stuck"

    def log(self, values):
        threading.Event().wait()


class Failing(Kept):
    name = "failing"

    def log(self, values):
        self.calls.append("log")
        raise OSError("no route to host")


def train(runs, tracker, hooks=(), max_epochs=1, **options):
    model = torch.nn.Linear(2, 1)
    return Trainer(
        TrainerConfig(runs=runs, progress="off", max_epochs=max_epochs),
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=torch.nn.functional.mse_loss,
        trackers=[tracker],
        hooks=hooks,
        **options,
    )


def events(runs, kind):
    (folder,) = runs.iterdir()
    return [e for e in read_records(folder / "events.jsonl") if e["kind"] == kind]


def test_a_tracker_gets_everything_that_the_record_has(tmp_path):
    tracker = Kept()
    trainer = train(tmp_path, tracker, hparams={"width": 2}, name="mine")
    trainer.fit(BATCHES)
    (folder,) = tmp_path.iterdir()
    record = [(r["step"], r["name"], r["value"]) for r in read_records(folder / "metrics.jsonl")]
    assert [(v.step, v.name, v.value) for v in tracker.values] == record
    assert tracker.calls == ["start", "completed"]
    assert (tracker.run.name, tracker.run.hyperparameters["width"]) == ("mine", 2)
    assert tracker.run.folder == folder


class Flush(Hook):
    """Writes the record after each step, which gives it to the trackers."""

    def on_step_end(self, run):
        run.flush()


def test_a_failing_tracker_is_logged_once_and_disabled(tmp_path, caplog):
    tracker = Failing()
    with caplog.at_level(logging.WARNING, logger="hookline"):
        train(tmp_path, tracker, hooks=[Flush()]).fit(BATCHES)
    assert tracker.calls.count("log") == 3
    messages = [r.getMessage() for r in caplog.records]
    assert len([m for m in messages if "'failing' failed. Training" in m]) == 1
    assert len([m for m in messages if "failed 3 times in a row and is disabled" in m]) == 1
    assert "the tracker 'failing' lacks 7 values" in caplog.text
    assert events(tmp_path, "end")[0]["status"] == "completed"


def test_a_stuck_tracker_neither_stops_training_nor_its_end(tmp_path, caplog):
    trainer = train(tmp_path, Stuck(), hooks=[Flush()])
    trainer._trackers = TrackerSet([Stuck()], max_values=3, end_seconds=0.1)
    trainer.fit(BATCHES)
    assert trainer.status == "completed"
    (event,) = events(tmp_path, "trackers")
    assert event["missing"]["stuck"]["dropped"] == 4  # of six losses and their mean
    assert "too slow: values are dropped" in caplog.text
    assert "has not ended: 3 values may be missing" in caplog.text


def test_the_run_is_complete_before_the_end_waits_for_trackers(tmp_path):
    class Slow(Kept):
        def start(self, run):
            is_waiting.wait(60)  # so that the run ends first
            return super().start(run)

        def finish(self, status):
            super().finish(status)
            self.seen = Run.open(self.run.folder).manifest["status"]
            self.ends = events(tmp_path, "end")
            Run.open(self.run.folder, resume=True).close("stopped")  # the lock is free

    is_waiting = threading.Event()
    tracker = Slow()
    trainer = train(tmp_path, tracker)
    finish = trainer._trackers.finish
    trainer._trackers.finish = lambda status: (is_waiting.set(), finish(status))
    trainer.fit(BATCHES)
    assert tracker.seen == "completed"
    assert tracker.ends[0]["status"] == "completed"
    assert tracker.calls == ["start", "completed"]
    assert Run.open(tracker.run.folder).manifest["status"] == "stopped"
    assert len(tracker.values) == 7
    assert Run.open(tracker.run.folder).manifest["trackers"] == {"kept": {"id": "one"}}


def test_a_value_that_is_refused_costs_no_other(tmp_path, caplog):
    class Picky(Kept):
        def log(self, values):
            log_each(self.log_one, values)

        def log_one(self, value):
            if value.step in (2, 3):
                raise OSError("too odd")
            self.values.append(value)

    tracker = Picky()
    train(tmp_path, tracker).fit(BATCHES)
    assert tracker.steps() == [1, 4, 5, 6]
    assert "has refused values: 2 values were refused" in caplog.text
    assert "the tracker 'kept' lacks 2 values" in caplog.text


def test_a_tool_that_is_gone_is_not_asked_for_each_value():
    asked = []

    def log(value):
        asked.append(value)
        raise OSError("gone")

    with pytest.raises(RefusedValues) as raised:
        log_each(log, range(100))
    assert len(asked) == 20
    assert raised.value.count == 100


def test_a_tracker_that_does_not_start_is_disabled(tmp_path, caplog):
    class Broken(Kept):
        def start(self, run):
            raise RuntimeError("no key")

    tracker = Broken()
    trainer = train(tmp_path, tracker)
    trainer.fit(BATCHES)
    assert trainer.status == "completed"
    assert "did not start: RuntimeError: no key" in caplog.text
    assert tracker.calls == []


def test_trackers_work_without_a_run(tmp_path):
    class Show(Hook):
        def on_step_end(self, trainer):
            trainer.log("picture", torch.rand(2, 2), kind="image")

    class Reader(Kept):
        def log(self, values):
            self.sizes = [len(v.value.read_bytes()) for v in values if v.kind == "image"]
            super().log(values)

    tracker = Reader()
    trainer = train(None, tracker, hooks=[Show()])
    trainer.fit(BATCHES)
    assert trainer.run is None
    assert tracker.steps() == [1, 2, 3, 4, 5, 6]
    assert len(tracker.sizes) == 6
    assert tracker.run.folder is None


@pytest.mark.parametrize("with_run", [True, False])
def test_attach_takes_trackers(tmp_path, with_run):
    tracker, model = Kept(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runs = tmp_path if with_run else None
    with hookline.attach(model, optimizer, trackers=[tracker], runs=runs) as session:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            session.log("speed", 2.0)
            optimizer.step()
            optimizer.zero_grad()
    names = {v.name for v in tracker.values}
    assert {"train/loss", "train/speed"} <= names
    assert tracker.calls == ["start", "completed"]
    assert bool(list(tmp_path.iterdir())) is with_run


def test_checkpoints_are_told_to_trackers(tmp_path):
    class Save(Hook):
        def on_step_end(self, trainer, step):
            if step == 2:
                trainer.save_checkpoint()

    tracker = Kept()
    train(tmp_path, tracker, hooks=[Save()]).fit(BATCHES)
    assert ("checkpoint", "step_000002", 2) in tracker.calls


def test_names_options_and_mistakes():
    assert isinstance(make_trackers([Kept()])["kept"], Tracker)
    assert list(make_trackers(["tensorboard", {"name": "wandb", "project": "p"}])) == [
        "tensorboard",
        "wandb",
    ]
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        make_trackers(["wandbb"])
    with pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"):
        make_trackers([{"name": "tensorboard", "colour": 1}])
    with pytest.raises(ConfigError, match="twice"):
        make_trackers(["wandb", "wandb"])
    with pytest.raises(ArgumentError, match="start, log and finish"):
        make_trackers([3])


@pytest.mark.parametrize("name", BUILT_IN_TRACKERS)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name):
    monkeypatch.setattr("hookline.trackers.names.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'hookline\[{name}\]'"):
        make_trackers([name])
