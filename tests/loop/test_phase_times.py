"""System use and phase times in the run, in every loop."""

import os
import threading
import time
from itertools import pairwise

import pytest
import torch
from every_loop import LOOPS, make_loader, make_model, make_optimizer
from fake_clock import FakeClock
from ignite_loops import run_ignite
from torch.nn import functional as F

import hookline
from hookline import Hook, Trainer, TrainerConfig
from hookline.loop import phase_times
from hookline.loop.phase_times import PHASES, PhaseTimes
from hookline.runs.system_sampler import SystemSampler
from hookline.tensors import timing

STEPS = 30


class Slow(torch.nn.Module):
    """Takes 6 ms forward, and 3 ms backward."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 1)

    def forward(self, tokens):
        time.sleep(0.006)
        vectors = self.embedding(tokens)
        if vectors.requires_grad:
            vectors.register_hook(lambda grad: time.sleep(0.003))
        return vectors.sum(1)


class Sleeps(Hook):
    def on_after_forward(self):
        time.sleep(0.004)

    def on_step_end(self):
        time.sleep(0.001)


def parts():
    model = Slow()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count):
    for _ in range(count):
        time.sleep(0.002)
        yield torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 1)


class Loader:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return batches(self.count)

    def __len__(self):
        return self.count


def fit(folder):
    config = TrainerConfig(progress="off", runs=folder, max_epochs=1)
    trainer = Trainer(config, *parts(), loss_fn=F.mse_loss, hooks=[Sleeps()])
    trainer.fit(Loader(STEPS), val_loaders=Loader(5))
    return trainer.run.path


def loop(folder):
    model, optimizer = parts()
    with hookline.attach(model, optimizer, hooks=[Sleeps()], runs=folder) as session:
        for x, y in session.batches(Loader(STEPS)):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with session.validation(), torch.no_grad():
            for x, y in session.batches(Loader(5)):
                session.log("loss", F.mse_loss(model(x), y))
        session.save_checkpoint(wait=True)
    return session.run.path


def ignite(folder):
    return run_ignite(folder, *parts(), Loader(STEPS), [Sleeps()])


@pytest.fixture(scope="module", params=[fit, loop, ignite])
def run(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOKLINE_SAMPLE_SECONDS", "0.1")
        path = request.param(tmp_path_factory.mktemp("runs"))
    assert not any(thread.name == "hookline-system" for thread in threading.enumerate())
    return request.param, hookline.open_run(path)


def test_the_system_is_recorded_with_the_step_that_training_has_reached(run):
    _, opened = run
    rows = opened.metrics("system/*")
    names = {row["name"] for row in rows}
    assert names >= {"system/cpu_percent", "system/memory_mb", "system/disk_free_gb"}
    steps = [row["step"] for row in rows if row["name"] == "system/memory_mb"]
    assert len(steps) >= 2
    assert all(1 <= first < second <= STEPS for first, second in pairwise(steps))
    assert all(row["value"] >= 0 for row in rows)
    memory = [row["value"] for row in rows if row["name"] == "system/memory_mb"]
    assert 10 < min(memory) <= max(memory) < 1e6


def test_phases_have_the_time_that_they_took(run):
    made_by, opened = run
    (end,) = opened.events("end")
    times = end["times"]
    assert set(times) == set(PHASES)
    assert times["data"] >= 0.9 * STEPS * 0.002
    assert times["forward"] >= 0.9 * STEPS * 0.006
    assert times["backward"] >= 0.9 * STEPS * 0.003
    assert times["optimizer"] > 0
    assert times["hooks"] >= 0.9 * STEPS * 0.005
    assert end["tokens_seen"] == 10 * STEPS
    if made_by is not ignite:
        assert times["validation"] >= 0.9 * 5 * 0.008
    assert (times["checkpoints"] > 0.001) is (made_by is loop)
    (start,) = opened.events("start")
    assert sum(times.values()) <= 1.05 * (end["time"] - start["time"])


def test_times_are_recorded_since_the_last_record(run):
    _, opened = run
    (end,) = opened.events("end")
    for phase in PHASES:
        values = [row["value"] for row in opened.metrics(f"time/{phase}")]
        assert len(values) >= 2
        assert sum(values) <= end["times"][phase] + 1e-9


def test_a_short_run_has_only_the_totals(tmp_path, monkeypatch):
    monkeypatch.delenv("HOOKLINE_SAMPLE_SECONDS")
    config = TrainerConfig(progress="off", runs=tmp_path)
    trainer = Trainer(config, *parts(), loss_fn=F.mse_loss).fit(Loader(2))
    opened = hookline.open_run(trainer.run.path)
    assert {row["name"] for row in opened.metrics()} == {"train/loss", "train/loss_epoch"}
    assert opened.events("end")[0]["times"]["forward"] > 0


def test_without_a_run_nothing_is_measured():
    class Threads(Hook):
        def on_step_end(self):
            self.seen = threading.active_count()

    before, watch = threading.active_count(), Threads()
    config = TrainerConfig(progress="off", runs=None)
    Trainer(config, *parts(), loss_fn=F.mse_loss, hooks=[watch]).fit(Loader(2))
    assert watch.seen == before


class EndsTraining(Hook):
    """Ends training in an event."""

    critical = True

    def __init__(self, event, error):
        self.event, self.error = event, error

    def on_train_start(self, step):
        if step == self.event:
            raise self.error

    on_step_end = on_train_start


@pytest.mark.parametrize(
    ("kind", "event", "error"),
    [
        ("trainer", 0, ValueError("broken")),
        ("trainer", 2, KeyboardInterrupt()),
        ("loop", 2, ValueError("broken")),
    ],
)
def test_the_thread_ends_with_training_also_after_an_error(
    kind, event, error, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOOKLINE_SAMPLE_SECONDS", "0.01")
    hooks = [EndsTraining(event, error)]

    def train():
        if kind == "trainer":
            config = TrainerConfig(progress="off", runs=tmp_path)
            Trainer(config, *parts(), loss_fn=F.mse_loss, hooks=hooks).fit(Loader(5))
            return
        model, optimizer = parts()
        with hookline.attach(model, optimizer, hooks=hooks, runs=tmp_path):
            for x, y in Loader(5):
                F.mse_loss(model(x), y).backward()
                optimizer.step()

    with pytest.raises((hookline.HookFailedError, KeyboardInterrupt)):
        train()
    assert not any(thread.name == "hookline-system" for thread in threading.enumerate())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_takes_no_samples(tmp_path, monkeypatch):
    monkeypatch.setenv("HOOKLINE_SAMPLE_SECONDS", "0.01")
    sampler = SystemSampler(tmp_path, None)
    pid = os.fork()
    if pid == 0:
        sampler.take()
        time.sleep(0.1)
        is_quiet = sampler.sample is None
        sampler.stop()
        os._exit(0 if is_quiet else 1)
    assert os.waitpid(pid, 0)[1] == 0
    sampler.stop()


@pytest.fixture
def clock(monkeypatch):
    return FakeClock(monkeypatch, phase_times, timing)


def test_short_batches_are_sampled_and_count_for_the_others(clock):
    phases = PhaseTimes(torch.device("cpu"))
    timed, count = 0, 20_000
    phases.wait_for_data()
    for _ in range(count):
        if phases.timed:
            timed += 1
            phases.begin_batch()
            clock.wait(10e-6)
            phases.lap("forward")
        phases.end_batch()
    assert timed < count / 10
    counted = phases._clock.take()["forward"][1]
    assert count - 2000 < counted <= count  # those since the last one count with the next one


# -- times and the duration of the run, in every loop ---------------------------------------------


def plain_loop(hooks, folder, data=None):
    """Train in a loop whose session knows only model and optimizer."""
    model = make_model()
    optimizer = make_optimizer(model)
    with hookline.attach(model, optimizer, hooks=hooks, runs=folder) as session:
        for x, y in data or make_loader():
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, session


EVERY_LOOP = {**LOOPS, "plain bare loop": plain_loop}


@pytest.mark.parametrize("name", EVERY_LOOP)
def test_no_phase_takes_longer_than_the_run_or_less_than_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOOKLINE_SAMPLE_SECONDS", "0.001")
    began = time.perf_counter()
    _, session = EVERY_LOOP[name]([], tmp_path)
    duration = time.perf_counter() - began
    assert session.hooks.summary().failures == {}
    opened = hookline.open_run(session.run.path)
    times = opened.events("end")[0]["times"]
    assert 0 < sum(times.values()) <= duration
    assert min(times.values()) >= 0
    assert {"forward", "backward"} <= set(times)  # each 0 if estimates of hooks take all of it
    recorded = [row["value"] for row in opened.metrics("time/*")]
    assert not recorded or (min(recorded) >= 0 and sum(recorded) <= duration)


def test_the_report_of_a_loop_that_loads_its_own_data_says_that_forward_includes_it(tmp_path):
    _, session = plain_loop([], tmp_path / "loader")
    facts = hookline.make_report(session.run.path).facts["runs"][0]
    assert facts["phase_seconds"]["data"] > 0
    _, session = plain_loop([], tmp_path / "own", list(make_loader()))
    facts = hookline.make_report(session.run.path).facts["runs"][0]
    assert "data" not in facts["phase_seconds"]
    assert facts["phase_seconds"]["data and forward"] > 0


def test_a_timed_batch_that_was_interrupted_does_not_make_the_run_longer():
    phases = PhaseTimes(torch.device("cpu"))
    began = time.perf_counter()
    for _ in range(2000):  # then about every 100th batch is timed, and counts for all of them
        if phases.timed:
            phases.begin_batch()
            phases.lap("forward")
        phases.end_batch()
    while not phases.timed:
        phases.end_batch()
    phases.begin_batch()
    time.sleep(0.05)  # the machine did something else
    phases.lap("forward")
    phases.end_batch()
    times = phases.take({})
    assert sum(times.values()) <= time.perf_counter() - began
    assert times["forward"] > 0.04
