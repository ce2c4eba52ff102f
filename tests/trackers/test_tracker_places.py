"""Where trackers are given, and what they survive: config files, hosts, signals and forks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
import torch
from commands import call_hookline, run_hookline
from test_tracker_thread import BATCHES, Kept, Stuck, train
from torch.utils.data import DataLoader, TensorDataset
from warm_processes import WarmParent

import hookline
from hookline import Hook
from hookline.runs.jsonl_reader import read_records
from hookline.runs.run import Run
from hookline.trackers import group

NET = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

def batches():
    return [(torch.ones(1, 2), torch.ones(1, 1))] * 3
"""

TRAINING = """\
model: net.Net
data: {train: net.batches}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
loss_fn: torch.nn.functional.mse_loss
trackers: [TRACKERS]
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def write_config(project, trackers):
    (project / "train.yaml").write_text(TRAINING.replace("TRACKERS", trackers))


class KeptWithProcess(Kept):
    """Also keeps in which processes it was called."""

    def __init__(self):
        super().__init__()
        self.pids = set()

    def log(self, values):
        self.pids.add(os.getpid())
        super().log(values)


def test_a_config_file_has_built_in_trackers(project):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_config(project, "tensorboard")
    done = run_hookline("train", "train.yaml", cwd=project)
    assert done.returncode == 0, done.stderr
    (folder,) = (project / "runs").iterdir()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ("tensorbord", "train.yaml:5: trackers: Unknown tracker 'tensorbord'. Did you mean 'tens"),
        ("net.Tracker", "trackers.0.name: It is 'net.Tracker'. Expected the name of a tracker"),
        ("{name: tensorboard, colour: 1}", "unexpected keyword argument 'colour'"),
        ("wandb, wandb", "'wandb' twice"),
    ],
)
def test_mistakes_in_a_config_file_are_said_before_training(project, trackers, message):
    write_config(project, trackers)
    code, output = call_hookline("train", "train.yaml", cwd=project)
    assert code != 0
    assert message in " ".join(output.split())
    assert not (project / "runs").exists()


def test_an_ignite_engine_has_trackers(tmp_path):
    from ignite.engine import Engine

    tracker, model = Kept(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        loss = model(batch[0]).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(step)
    hookline.attach(
        engine, model=model, optimizer=optimizer, trackers=[tracker], runs=tmp_path / "runs"
    )
    engine.run(BATCHES, max_epochs=1)
    assert tracker.steps() == [1, 2, 3, 4, 5, 6]
    assert tracker.calls == ["start", "completed"]


def test_workers_of_a_data_loader_may_be_forked_while_a_tracker_runs(tmp_path):
    class Busy(KeptWithProcess):
        def start(self, run):
            super().start(run)
            threading.Thread(target=self.log_forever, daemon=True).start()

        def log_forever(self):  # holds locks of logging while processes are forked
            while "completed" not in self.calls:
                time.sleep(0)

    class Flush(Hook):
        def on_step_end(self, trainer):
            trainer.run.flush()

    tracker = Busy()
    data = TensorDataset(torch.ones(12, 2), torch.ones(12, 1))
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    trainer = train(tmp_path, tracker, [Flush()], max_epochs=2)
    trainer.fit(loader)
    assert trainer.status == "completed"
    assert tracker.steps() == list(range(1, 13))
    assert tracker.pids == {os.getpid()}


class Send(Hook):
    """Sends this process a signal after a step."""

    def __init__(self, name):
        self.signal = getattr(signal, name)

    def on_step_end(self, trainer, step):
        trainer.run.flush()
        if step == 3:
            os.kill(os.getpid(), self.signal)


def train_and_signal(folder, name):
    """Train with a tracker that is stuck, and print how training ended."""
    assert group._SHORT_END_SECONDS == 5.0
    group._SHORT_END_SECONDS = 0.2
    trainer = train(folder, Stuck(), [Send(name)])
    end = "returned"
    try:
        trainer.fit(BATCHES)
    except KeyboardInterrupt:
        end = "KeyboardInterrupt"
    print(json.dumps([end, trainer.status]))


def train_and_die(folder):
    """Train with a tracker that is stuck, and be killed while the end waits for it."""
    trainer = train(folder, Stuck())
    finish = trainer._trackers.finish

    def finish_and_die(status):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        finish(status)

    trainer._trackers.finish = finish_and_die
    trainer.fit(BATCHES)


def train_and_signal_at_the_end(folder, name):
    """Train with a tracker that is stuck, and get a signal while the end waits for it."""
    group._SHORT_END_SECONDS = 0.2
    trainer = train(folder, Stuck())
    trainer._trackers._end_seconds = 3600.0
    wait = trainer._trackers._wait

    def signal_and_wait(until):
        trainer._trackers._wait = wait
        os.kill(os.getpid(), getattr(signal, name))
        return wait(until)

    trainer._trackers._wait = signal_and_wait
    end = "returned"
    try:
        trainer.fit(BATCHES)
    except KeyboardInterrupt:
        end = "KeyboardInterrupt"
    print(json.dumps([end, trainer.status]))


@pytest.fixture(scope="module")
def parent():
    with WarmParent() as parent:
        yield parent


@pytest.mark.parametrize(
    ("name", "end"),
    [("SIGINT", ["KeyboardInterrupt", "interrupted"]), ("SIGTERM", ["returned", "preempted"])],
)
def test_after_a_signal_the_wait_for_trackers_is_short(tmp_path, parent, name, end):
    runs = tmp_path / "runs"
    process = parent.start(train_and_signal, runs, name, log=tmp_path / "log.txt")
    assert process.wait() == 0, process.output
    assert json.loads(process.output.splitlines()[-1]) == end
    assert "has not ended: 3 values may be missing" in process.output
    (folder,) = runs.iterdir()
    assert Run.open(folder).manifest["status"] == end[1]
    last = list(read_records(folder / "events.jsonl"))[-1]
    assert (last["kind"], last["status"]) == ("end", end[1])


def test_a_signal_shortens_the_wait_for_trackers(tmp_path, parent):
    runs = tmp_path / "runs"
    log = tmp_path / "log.txt"
    process = parent.start(train_and_signal_at_the_end, runs, "SIGTERM", log=log)
    assert process.wait() == 0, process.output
    assert json.loads(process.output.splitlines()[-1]) == ["returned", "completed"]
    assert "has not ended" in process.output


def test_a_process_that_is_killed_while_it_waits_has_completed_its_run(tmp_path, parent):
    runs = tmp_path / "runs"
    process = parent.start(train_and_die, runs, log=tmp_path / "log.txt")
    assert process.wait() == -signal.SIGKILL, process.output
    (folder,) = runs.iterdir()
    assert Run.open(folder).manifest["status"] == "completed"
    assert list(read_records(folder / "events.jsonl"))[-1]["kind"] == "end"
    Run.open(folder, resume=True).close()  # the lock is free
