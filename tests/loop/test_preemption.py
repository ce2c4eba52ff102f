"""Signals that ask a training process to end: what is saved, and what resuming from it gives."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import batches, make_trainer, run_on_two_ranks, same, weights
from rank_checks import run_ranks
from torch.utils.data import DataLoader

import hookline
from hookline.loop.control_requests import ControlRequests
from hookline.loop.signals import SignalWatch
from hookline.trainer.lifecycle import _unanswered

DATA, VAL = batches(5), batches(3, seed=2)


def shuffled_val() -> Any:
    """Return a loader whose own generator a validation advances."""
    samples = [(x[0], y[0]) for x, y in VAL]
    generator = torch.Generator().manual_seed(4)
    return DataLoader(samples, batch_size=1, shuffle=True, generator=generator)


class SignalAt(hookline.Hook):
    """Sends this process a signal in an event, when a counter of the event is reached."""

    def __init__(self, event: str, at: int = 1, number: int = signal.SIGTERM) -> None:
        self.at, self.number, self.count = at, number, 0
        setattr(self, event, self.receive)

    def receive(self) -> None:
        self.count += 1
        if self.count == self.at:
            signal.raise_signal(self.number)


class ValidationCounter(hookline.Hook):
    """Counts validation batches and validations, in its state, on the trainer and in the log."""

    def __init__(self) -> None:
        self.batches = self.ends = 0

    def on_train_start(self, trainer: Any) -> None:
        trainer.validation_batches = 0
        trainer.register_for_checkpoint("validation_batches")

    def on_validation_start(self, trainer: Any) -> None:
        trainer.log("validation_started", 1.0)

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        trainer.log("epoch_started", float(epoch))

    def on_validation_batch_end(self, trainer: Any) -> None:
        self.batches += 1
        trainer.validation_batches += 1
        trainer.log("validation_batches", trainer.validation_batches)

    def on_validation_end(self) -> None:
        self.ends += 1

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def make(tmp_path: Path, *hooks: hookline.Hook, **fields: Any) -> hookline.Trainer:
    fields = {"runs": tmp_path, "max_epochs": 2, "validate_every_steps": 2, "seed": 3, **fields}
    return make_trainer(
        *hooks, ValidationCounter(), hookline.EMA(decay=0.5, every_n_steps=1), **fields
    )


def outcome(trainer: hookline.Trainer) -> tuple[Any, ...]:
    """Return what must not depend on interruptions: records, hook states, counters."""
    run = hookline.open_run(trainer.run.path)
    records = [(r["step"], r["epoch"], r["name"], r["value"]) for r in run.metrics()]
    counter = trainer.hooks.get_hook("validation_counter")
    return records, vars(counter), trainer.step, trainer.epoch, trainer.status


@pytest.mark.parametrize(
    ("event", "at"),
    [
        ("on_train_start", 1),
        ("on_epoch_start", 2),
        ("on_train_batch_start", 3),
        ("on_step_end", 2),  # validation follows
        ("on_step_end", 5),  # the epoch's last step
        ("on_validation_start", 1),
        ("on_validation_batch_end", 2),  # within a validation between two steps
        ("on_validation_batch_end", 8),  # within the one at the end of the first epoch
        ("on_epoch_end", 1),
    ],
)
@pytest.mark.parametrize("sanity", [False, True])
def test_resuming_after_a_signal_gives_the_uninterrupted_run(tmp_path, event, at, sanity):
    expected = make(tmp_path / "whole", sanity=sanity)
    expected.fit(DATA, shuffled_val())

    first = make(tmp_path / "parts", SignalAt(event, at), sanity=sanity)
    first.fit(DATA, shuffled_val())
    assert first.status == "preempted"
    assert first.stop_signal == "SIGTERM"
    assert hookline.open_run(first.run.path).status == "preempted"

    second = make(tmp_path / "parts", sanity=sanity)
    second.fit(DATA, shuffled_val(), resume_from=first.run.path)
    assert second.run.path == first.run.path
    assert outcome(second) == outcome(expected)
    assert same(weights(second.model), weights(expected.model))


def test_a_hook_whose_state_cannot_be_saved_does_not_stop_a_validation_without_checkpoints():
    class Holder(hookline.Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"value": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    trainer = make_trainer(Holder(), max_epochs=1)
    trainer.fit(DATA, VAL)
    assert trainer.status == "completed"


def test_a_signal_in_validation_saves_the_training_weights_and_not_the_average(tmp_path):
    trainer = make(tmp_path, SignalAt("on_validation_batch_end"))
    trainer.fit(DATA, VAL)
    saved = hookline.open_run(trainer.run.path).checkpoints()[-1]
    other = make(tmp_path / "other").model
    saved.load_into(other)
    assert same(weights(other), weights(trainer.model))
    assert saved.step == 2


def test_ctrl_c_saves_and_raises(tmp_path):
    trainer = make(tmp_path, SignalAt("on_train_batch_start", 3, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(DATA, VAL)
    run = hookline.open_run(trainer.run.path)
    assert (trainer.status, run.status) == ("interrupted", "interrupted")
    assert run.checkpoints()[-1].step == 3


def test_a_signal_saves_no_second_time_what_a_hook_saves_in_the_same_step(tmp_path):
    class SaveAndSignal(hookline.Hook):
        def on_step_end(self, step: int, trainer: Any) -> None:
            if step == 2:
                trainer.save_checkpoint()
                signal.raise_signal(signal.SIGTERM)

    trainer = make_trainer(SaveAndSignal(), runs=tmp_path)
    trainer.fit(DATA)
    assert trainer.status == "preempted"
    saved = hookline.open_run(trainer.run.path).checkpoints()
    assert [one.path.name for one in saved] == ["step_000002"]


def test_a_second_signal_acts_at_once(tmp_path):
    class Twice(hookline.Hook):
        def on_before_forward(self) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    trainer = make(tmp_path, Twice())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(DATA, VAL)
    assert trainer.step == 0
    assert not hookline.open_run(trainer.run.path).checkpoints()


def test_handlers_come_back(tmp_path):
    def mine(number: int, frame: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        make(tmp_path, SignalAt("on_step_end", 1, signal.SIGUSR1)).fit(DATA, VAL)
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_that_are_not_configured_are_left_alone(tmp_path):
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        trainer = make(
            tmp_path,
            SignalAt("on_step_end", 1, signal.SIGUSR1),
            checkpoints={"signals": ["SIGTERM"]},
        )
        trainer.fit(DATA, VAL)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert trainer.status == "completed"
    assert received == [signal.SIGUSR1]


def test_training_outside_of_the_main_thread_works_without_signals(tmp_path):
    trainer = make(tmp_path)
    thread = threading.Thread(target=trainer.fit, args=(DATA, VAL))
    thread.start()
    thread.join()
    assert trainer.status == "completed"


def test_training_that_stops_at_the_same_boundary_ends_as_stopped(tmp_path):
    class Stop(hookline.Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                trainer.stop("enough")
                signal.raise_signal(signal.SIGTERM)

    trainer = make(tmp_path, Stop())
    trainer.fit(DATA, VAL)
    assert (trainer.status, trainer.stop_reason, trainer.step) == ("stopped", "enough", 3)


def test_without_a_run_folder_training_ends_and_says_that_nothing_is_saved(caplog):
    trainer = make_trainer(SignalAt("on_step_end", 2), max_epochs=2)
    trainer.fit(DATA)
    assert (trainer.status, trainer.step) == ("preempted", 2)
    assert "nothing is saved" in caplog.text


RANKS = """
import faulthandler
import os
import signal

import torch

import hookline

faulthandler.dump_traceback_later(100, exit=True)  # a rank that waits for ever


class Signal(hookline.Hook):
    def on_step_end(self, step):
        if step == 2 and os.environ["RANK"] == "0":
            signal.raise_signal(signal.SIGTERM)


model = torch.nn.Linear(8, 4)
config = hookline.TrainerConfig(max_epochs=1, runs=None, progress="off", strategy="ddp")
loss_fn = torch.nn.functional.mse_loss
optimizer = torch.optim.SGD(model.parameters())
trainer = hookline.Trainer(config, model, optimizer, hooks=[Signal()], loss_fn=loss_fn)
trainer.fit([(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(8)])
print(f"{trainer.status} {trainer.step}\\n", end="")  # in one write: the ranks share a pipe
"""


def test_without_a_run_folder_a_signal_ends_all_processes(tmp_path):
    assert run_on_two_ranks(RANKS, tmp_path).count("preempted 2") == 2


def test_saving_that_takes_longer_than_the_grace_period_is_said_once(tmp_path, caplog):
    class SaveEveryStep(hookline.Hook):
        def on_step_end(self, trainer: Any) -> None:
            trainer.save_checkpoint()

    caplog.set_level(logging.WARNING)
    make(tmp_path, SaveEveryStep(), checkpoints={"grace_seconds": 1e-9}).fit(DATA, VAL)
    assert caplog.text.count("before it is killed") == 1


def test_watches_that_end_in_the_order_in_which_they_began_leave_no_handler():
    before = signal.getsignal(signal.SIGTERM)
    first, second = (SignalWatch(ControlRequests(), ["SIGTERM"]) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__()
    second.__exit__()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_forked_process_still_ends_when_it_is_asked_to():
    requests = ControlRequests()
    with SignalWatch(requests, ["SIGTERM"]):
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C in the terminal: the parent decides
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert requests.signal is None


def test_a_crash_saves_a_checkpoint_that_only_its_folder_names(tmp_path):
    class Crash(hookline.Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.save_checkpoint()

    model_calls = 0

    def step_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal model_calls
        model_calls += 1
        if model_calls == 5:
            raise RuntimeError("a bug")
        return model(batch[0]).square().mean()

    trainer = make_trainer(
        Crash(), runs=tmp_path, checkpoints={"on_crash": True}, step_fn=step_fn, max_epochs=2
    )
    with pytest.raises(RuntimeError, match="a bug"):
        trainer.fit(DATA)
    folder = trainer.run.path / "checkpoints"
    assert (folder / "crash_000004" / "manifest.json").is_file()
    assert hookline.checkpoint.find_checkpoint(trainer.run.path) == folder / "step_000002"


class SaveIn(hookline.Hook):
    """Asks for a checkpoint in the n-th call of an event."""

    def __init__(self, event: str, at: int) -> None:
        self.at, self.count = at, 0
        setattr(self, event, self.save)

    def save(self, trainer: Any) -> None:
        self.count += 1
        if self.count == self.at:
            trainer.save_checkpoint()


@pytest.mark.parametrize(
    ("event", "at"),
    [
        ("on_epoch_start", 1),
        ("on_epoch_start", 2),
        ("on_validation_start", 1),  # of the validation before the first step
        ("on_validation_batch_end", 2),
        ("on_validation_end", 1),
        ("on_validation_end", 2),
        ("on_epoch_end", 1),
    ],
)
def test_a_checkpoint_that_a_hook_asks_for_in_any_event_resumes_exactly(tmp_path, event, at):
    expected = make(tmp_path / "whole", sanity=True)
    expected.fit(DATA, VAL)
    saving = make(tmp_path / "runs", sanity=True)
    saving.add_hook(SaveIn(event, at))  # after the hooks whose state is compared
    saving.fit(DATA, VAL)
    resumed = make(tmp_path / "runs", sanity=True)
    resumed.fit(DATA, VAL, resume_from=saving.run.path)
    assert outcome(resumed) == outcome(expected)
    assert same(weights(resumed.model), weights(expected.model))


def test_a_signal_reaches_a_training_within_which_another_one_runs(tmp_path):
    class Inner(hookline.Hook):
        def on_epoch_end(self) -> None:
            inner = make(tmp_path / "inner", SignalAt("on_step_end", 2))
            inner.fit(DATA, VAL)
            self.status = inner.status

    outer = make(tmp_path / "outer", hook := Inner())
    outer.fit(DATA, VAL)
    assert (hook.status, outer.status, outer.stop_signal) == ("preempted", "preempted", "SIGTERM")


def test_a_signal_at_the_end_of_training_is_not_lost(tmp_path, caplog):
    trainer = make(tmp_path, SignalAt("on_train_end"))
    trainer.fit(DATA, VAL)
    assert (trainer.status, trainer.stop_signal) == ("completed", "SIGTERM")
    assert "SIGTERM came when training was ending with the status 'completed'" in caplog.text
    trainer = make(tmp_path, SignalAt("on_train_end", number=signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(DATA, VAL)
    assert trainer.status == "completed"


def test_a_checkpoint_that_is_asked_for_after_an_exception_is_not_dropped_silently(
    tmp_path, caplog
):
    class Save(hookline.Hook):
        def on_exception(self, trainer: Any) -> None:
            assert trainer.save_checkpoint() is None

    trainer = make(tmp_path, Save())
    with pytest.raises(Exception, match="mat1"):
        trainer.fit([(torch.ones(4, 3), torch.ones(4, 4))])
    assert "asked for at step 0 was not saved" in caplog.text


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="no SIGCHLD here")
def test_workers_that_the_signal_ends_too_do_not_stop_the_save(tmp_path):
    def fail(number: int, frame: Any) -> None:
        raise RuntimeError("DataLoader worker is killed by signal")  # as torch's handler does

    class EndWorker(hookline.Hook):
        def on_before_backward(self) -> None:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGCHLD)

    previous = signal.signal(signal.SIGCHLD, fail)
    try:
        trainer = make(tmp_path, EndWorker())
        trainer.fit(DATA, VAL)
        assert signal.getsignal(signal.SIGCHLD) is fail
    finally:
        signal.signal(signal.SIGCHLD, previous)
    info = next(i for i in trainer.hooks.describe() if i.name == "end_worker")
    assert (trainer.status, trainer.step, info.failures) == ("preempted", 1, 0)
    assert (trainer.run.checkpoints / "step_000001").is_dir()


class Stalled:
    """A storage that never answers."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def upload(self, bundle: Any, under: str, is_stopped: Any) -> str:
        self.answer.wait()
        return "nowhere"


@pytest.mark.parametrize("second", [False, True])
def test_a_preempted_job_is_requeued_before_a_stalled_upload_ends(
    tmp_path, monkeypatch, caplog, second
):
    tools = tmp_path / "tools"
    tools.mkdir()
    ends = "kill -TERM $PPID\n" if second else ""  # as Slurm ends a job that is requeued
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tools}/called\n{ends}')
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    seen: list[bool] = []

    class AtEnd(hookline.Hook):
        def on_train_end(self) -> None:
            seen.append((tools / "called").exists())

    upload, storage = hookline.UploadHook(tmp_path / "copies"), Stalled()
    upload._destination = storage  # type: ignore[assignment]
    saving = {"requeue": True, "grace_seconds": 1.0}
    hooks = (SignalAt("on_step_end", 3), AtEnd(), upload)
    trainer = make(tmp_path / "runs", *hooks, checkpoints=saving)
    try:
        trainer.fit(DATA, VAL)
    finally:
        storage.answer.set()
        for thread in threading.enumerate():
            if thread.name == "hookline-upload":
                thread.join()
    assert trainer.status == "preempted"
    assert seen == [True]
    assert (tools / "called").read_text() == "requeue 4711\n"
    (run,) = (tmp_path / "runs").iterdir()
    assert hookline.open_run(run).manifest["status"] == "preempted"
    assert "1 checkpoints were not copied" in caplog.text
    assert str(upload.failed[0]) in caplog.text


def test_a_scheduler_that_does_not_answer_takes_only_a_part_of_the_grace_time(
    tmp_path, monkeypatch, caplog
):
    tools = tmp_path / "tools"
    tools.mkdir()
    waits = f"until [ -e {tools}/answer ]; do sleep 0.1; done"
    (tools / "scontrol").write_text(f"#!/bin/sh\n{waits}\ntouch {tools}/done\n")
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    saving = {"requeue": True, "grace_seconds": 1.0}
    trainer = make(tmp_path / "runs", SignalAt("on_step_end", 3), checkpoints=saving)
    trainer.fit(DATA, VAL)
    assert trainer.status == "preempted"
    assert "`scontrol requeue 4711` has not answered" in caplog.text
    assert not (tools / "done").exists()
    (tools / "answer").touch()  # the call was not ended with the wait for it
    _unanswered.pop().communicate(timeout=60)
    assert (tools / "done").exists()


def test_a_signal_to_one_rank_limits_what_hooks_of_the_others_wait_for(tmp_path):
    assert run_ranks("signalled_rank.py", tmp_path).count("fine") == 2
