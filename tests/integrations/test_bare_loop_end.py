"""How the run of a bare loop ends: at SIGTERM, and at Ctrl-C while the block is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_loop import EPOCHS, LOOPS
from loops import batches, make, same, weights
from torch.nn import functional as F
from torch.utils.data import Dataset
from warm_processes import run_warm

import hookline


class Events(hookline.Hook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_exception(self, exception: BaseException) -> None:
        self.seen.append("exception")

    def on_train_end(self, status: str) -> None:
        self.seen.append(f"end {status}")


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the manifest and the events of the only run."""
    (run,) = folder.iterdir()
    lines = (run / "events.jsonl").read_text().splitlines()
    return json.loads((run / "manifest.json").read_text()), [json.loads(line) for line in lines]


def train(
    folder: Path, *hooks: hookline.Hook, signal_at: int = 3, swallows: bool = False, steps: int = 6
) -> Any:
    """Train, and send SIGTERM in a step; return the session."""
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=hooks, runs=folder) as session:
        for i, (x, y) in enumerate(batches(steps)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            try:
                if i + 1 == signal_at:
                    os.kill(os.getpid(), signal.SIGTERM)
            except BaseException:
                if not swallows:
                    raise
            optimizer.step()
    return session


def test_sigterm_ends_a_bare_loop_as_preempted(tmp_path):
    events, before = Events(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        train(tmp_path, events)
    assert raised.value.code == 143
    assert events.seen == ["end preempted"]
    manifest, recorded = read_run(tmp_path)
    assert (manifest["status"], manifest["last_error"]) == ("preempted", None)
    assert [e["kind"] for e in recorded] == ["start", "signal", "end"]
    assert recorded[1]["signal"] == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_that_the_loop_swallows_ends_it_after_the_step(tmp_path):
    events = Events()
    with pytest.raises(SystemExit):
        train(tmp_path, events, swallows=True)
    manifest, recorded = read_run(tmp_path)
    assert manifest["status"] == "preempted"
    assert recorded[-1]["step"] == 3


def test_a_handler_of_the_user_decides_what_sigterm_does(tmp_path):
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        own = signal.getsignal(signal.SIGTERM)
        session = train(tmp_path, Events())
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert session.step == 6  # the handler did not end the loop
    assert read_run(tmp_path)[0]["status"] == "preempted"


def test_a_handler_that_the_user_sets_later_is_left_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)

    class Replace(hookline.Hook):
        def on_step_end(self) -> None:
            signal.signal(signal.SIGTERM, handle)

    try:
        train(tmp_path, Replace())
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_an_ignored_sigterm_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert train(tmp_path).step == 6
    finally:
        signal.signal(signal.SIGTERM, before)
    assert read_run(tmp_path)[0]["status"] == "completed"


def test_a_checkpoint_is_not_saved_in_the_middle_of_a_step(tmp_path):
    class Save(hookline.Hook):
        def on_after_backward(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.save_checkpoint()

    with pytest.raises(SystemExit):
        train(tmp_path, Save())
    (run,) = tmp_path.iterdir()
    assert not (run / "checkpoints").exists()


class Kill(Dataset):  # type: ignore[type-arg]
    """Sends SIGTERM to all processes of the group, as a cluster does."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20:
            os.killpg(os.getpgid(0), signal.SIGTERM)
        return torch.ones(8)


SCRIPT = """
import sys, torch, hookline
from pathlib import Path
from torch.utils.data import DataLoader
sys.path.insert(0, {tests!r})
from test_bare_loop_end import Events, Kill

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
session = hookline.attach(model, optimizer, hooks=[Events()], runs={folder!r})
for batch in DataLoader(Kill(), num_workers={workers}):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_to_all_processes_ends_a_script_without_a_block_as_preempted(tmp_path, workers):
    tests = str(Path(__file__).parent)
    script = SCRIPT.format(tests=tests, folder=str(tmp_path), workers=workers)
    done = run_warm(["-c", script], environment=os.environ)
    assert done.returncode == 143, done.stderr
    assert read_run(tmp_path)[0]["status"] == "preempted"


# -- Ctrl-C while the block is left ---------------------------------------------------------------


class CtrlCAtEnd(hookline.Hook):
    def on_train_end(self) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_block_is_left_is_no_failure_and_the_run_can_be_resumed(tmp_path):
    def run(steps: int) -> int:
        model, optimizer = make()
        session = hookline.attach(model, optimizer, hooks=[CtrlCAtEnd()], runs=tmp_path)
        start = session.load_checkpoint()
        first = start.step if start else 0
        with pytest.raises(KeyboardInterrupt), session:
            for x, y in batches(steps):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            if first == 0:
                session.save_checkpoint(wait=True)
        return first

    assert [run(2), run(2), run(2), run(2)] == [0, 2, 2, 2]  # not refused as a crash loop
    manifest, _ = read_run(tmp_path)
    assert [part["status"] for part in manifest["attempts"]] == ["interrupted"] * 4


# -- SIGTERM while training ends ------------------------------------------------------------------


def run_in_fork(function: Callable[[], object]) -> int:
    """Call a function in a forked process; return its exit code."""
    if (child := os.fork()) == 0:
        try:
            function()
        except SystemExit as error:
            os._exit(int(error.code or 0))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class SigtermAtEnd(hookline.Hook):
    def on_train_end(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("name", LOOPS)
def test_sigterm_in_on_train_end_loses_no_run(tmp_path, name):
    code = run_in_fork(lambda: LOOPS[name]([SigtermAtEnd()], tmp_path))
    manifest, events = read_run(tmp_path / "runs")
    expected = ("preempted", 143) if "loop" in name else ("completed", 0)
    assert (manifest["status"], code) == expected
    assert [event["kind"] for event in events].count("end") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("name", ["bare loop", "ignite"])
@pytest.mark.parametrize("function", ["close", "close_record"])
def test_sigterm_while_the_run_is_closed_waits_until_it_is(tmp_path, name, function):
    """It comes when the loop ends its record, or the record closes the run."""

    def send(frame: Any, event: str, arg: Any) -> None:
        is_recorder = type(frame.f_locals.get("self")).__name__ in ("Loop", "Record")
        if event == "call" and is_recorder and frame.f_code.co_name == function:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    def train() -> None:
        sys.setprofile(send)
        LOOPS[name]([Events()], tmp_path)

    code = run_in_fork(train)
    manifest, _ = read_run(tmp_path / "runs")
    assert manifest["status"] == "completed"
    assert code == (-signal.SIGTERM if name == "bare loop" else 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_sigterm_ends_a_session_that_began_within_another_one_which_has_ended(tmp_path):
    def run() -> None:
        first, second = (hookline.attach(*make(), runs=tmp_path / name) for name in "ab")
        first.begin()
        with second:
            first.detach()
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_in_fork(run) == 143
    assert [read_run(tmp_path / name)[0]["status"] for name in "ab"] == ["completed", "preempted"]


# -- exceptions in the report of the last checkpoint ----------------------------------------------


class Cancelled(BaseException):
    """As that of a library that cancels tasks."""


@pytest.mark.parametrize("name", ["trainer", "bare loop"])
@pytest.mark.parametrize("error", [SystemExit, Cancelled, KeyboardInterrupt])
def test_an_exit_exception_at_the_last_checkpoint_keeps_no_hook_from_the_end(tmp_path, name, error):
    class SaveLast(hookline.Hook):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            if epoch == EPOCHS - 1:
                trainer.save_checkpoint()

        def on_checkpoint_save(self) -> None:
            raise error

    events = Events()
    with pytest.raises(error):
        LOOPS[name]([SaveLast(), events], tmp_path)
    assert [line[:3] for line in events.seen if line != "exception"] == ["end"]


# -- signals with a hook that saves ---------------------------------------------------------------


def loop_with_a_schedule(folder: Path, hook: Any, *, signal_at: int = 0, steps: int = 6) -> Any:
    """Train with dropout and a scheduler, which steps after the optimizer; continue a run."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    hooks = [hookline.ModelCheckpoint(every_n_steps=100), hook]
    session = hookline.attach(model, optimizer, hooks=hooks, schedulers=scheduler, runs=folder)
    start = session.load_checkpoint()
    with session:
        for x, y in batches(steps)[start.step if start else 0 :]:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if session.step + 1 == signal_at:
                os.kill(os.getpid(), hook.number)
            optimizer.step()
            scheduler.step()
    return model, session


class Sent(hookline.Hook):
    """The signal to send, and what hooks are told."""

    def __init__(self, number: int) -> None:
        self.number, self.steps, self.ends = number, [], []

    def on_step_end(self, step: int) -> None:
        self.steps.append(step)

    def on_train_end(self, status: str) -> None:
        self.ends.append(status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_a_last_checkpoint_from_which_the_loop_continues_exactly(
    number, tmp_path, capsys
):
    whole, _ = loop_with_a_schedule(tmp_path / "whole", Sent(number))
    before = signal.getsignal(number)
    hook = Sent(number)
    with pytest.raises(SystemExit) as raised:
        loop_with_a_schedule(tmp_path / "runs", hook, signal_at=3)
    assert raised.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert (hook.steps, hook.ends) == ([1, 2, 3], ["preempted"])
    manifest, recorded = read_run(tmp_path / "runs")
    assert (manifest["status"], manifest["last_error"]) == ("preempted", None)
    assert [e["kind"] for e in recorded] == ["start", "signal", "checkpoint", "end"]
    assert recorded[1]["signal"] == signal.Signals(number).name
    said = capsys.readouterr().err
    assert f"{signal.Signals(number).name}: saved" in said
    assert "session.load_checkpoint()" in said
    resumed, session = loop_with_a_schedule(tmp_path / "runs", Sent(number))
    assert session.step == 6
    assert same(weights(resumed), weights(whole))
    assert read_run(tmp_path / "runs")[0]["status"] == "completed"


def test_a_handler_of_the_program_is_called_too_and_decides_when_the_loop_ends(tmp_path):
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    hook = Sent(signal.SIGUSR1)
    try:
        _, session = loop_with_a_schedule(tmp_path, hook, signal_at=3)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
    assert session.step == 6
    assert hook.ends == ["preempted"]
    (run,) = tmp_path.iterdir()
    assert "step_000003" in {path.name for path in (run / "checkpoints").iterdir()}


def test_a_signal_in_the_last_step_saves_before_the_block_is_left(tmp_path):
    hook = Sent(signal.SIGTERM)
    loop_with_a_schedule(tmp_path, hook, signal_at=6)
    assert hook.ends == ["preempted"]
    (run,) = tmp_path.iterdir()
    assert "step_000006" in {path.name for path in (run / "checkpoints").iterdir()}


def test_sigusr1_without_a_hook_that_saves_closes_the_run(tmp_path):
    model, optimizer = make()
    with (
        pytest.raises(SystemExit) as raised,
        hookline.attach(model, optimizer, hooks=[Events()], runs=tmp_path),
    ):
        model(batches(1)[0][0]).sum().backward()
        os.kill(os.getpid(), signal.SIGUSR1)
    assert raised.value.code == 128 + signal.SIGUSR1
    assert read_run(tmp_path)[0]["status"] == "preempted"


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    def work() -> None:
        model, optimizer = make()
        hooks = [hookline.ModelCheckpoint(every_n_steps=100)]
        with hookline.attach(model, optimizer, hooks=hooks, runs=tmp_path):
            model(batches(1)[0][0]).sum().backward()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            optimizer.step()

    assert run_in_fork(work) == -signal.SIGTERM
