"""Processes that are forked while a loop trains: their copy of the loop does nothing."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_loop import LOOPS
from loops import batches, make
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hookline

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


class Fork(hookline.Hook):
    """Forks in step 2; the parent waits for the child, which leaves the hook in its own way."""

    def __init__(self, log: Path, leave: Callable[[], None]) -> None:
        self.log, self.leave = log, leave
        self.parent, self.exit_code = os.getpid(), -1

    def write(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{'parent' if os.getpid() == self.parent else 'child'}: {text}\n")

    def on_step_end(self, step: int) -> None:
        self.write(f"step {step}")
        if step != 2 or os.getpid() != self.parent:
            return
        child = os.fork()
        if child == 0:
            self.leave()
        else:
            self.exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def on_exception(self, exception: BaseException) -> None:
        self.write("exception")

    def on_train_end(self, trainer: Any) -> None:
        self.write("end")


class Save(hookline.Hook):
    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 4 and hasattr(trainer, "save_checkpoint"):
            trainer.save_checkpoint()


def run_and_fork(name: str, folder: Path, leave: Callable[[], None]) -> Fork:
    """Train in a loop; return its hook. The child ends here, also after an exception."""
    folder.mkdir(exist_ok=True)
    fork, parent = Fork(folder / "log", leave), os.getpid()
    hooks = [fork] if name in ("transformers", "lightning") else [fork, Save()]
    try:
        LOOPS[name](hooks, folder)
    except SystemExit as error:
        os._exit(7 if error.code == "in the child" else 1)
    except BaseException:
        if os.getpid() == parent:
            raise
        os._exit(1)
    if os.getpid() != parent:
        os._exit(0)
    return fork


def read_record(folder: Path) -> tuple[Any, ...]:
    """Return what a run has: its status, metrics, events and checkpoints."""
    (run,) = (folder / "runs").iterdir()

    def lines(name: str) -> list[Any]:
        return [json.loads(line) for line in (run / name).read_text().splitlines()]

    metrics = [(r["step"], r["name"]) for r in lines("metrics.jsonl") if "train/" in r["name"]]
    events = [r["kind"] for r in lines("events.jsonl")]
    manifest = json.loads((run / "manifest.json").read_text())
    saved = sorted(p.name for p in (run / "checkpoints").glob("*"))
    return manifest["status"], manifest["lost_records"], metrics, events, saved


def run_in_fork(function: Callable[[], None]) -> None:
    """Call a function in a forked process, and fail if it raises."""
    if (child := os.fork()) == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def end_with_system_exit() -> None:
    raise SystemExit("in the child")


@pytest.mark.parametrize("name", LOOPS)
def test_a_forked_process_that_trains_on_calls_no_hooks_and_writes_nothing(name, tmp_path):
    fork = run_and_fork(name, tmp_path / "forked", lambda: None)
    plain = run_and_fork(name, tmp_path / "plain", lambda: os._exit(0))
    assert fork.exit_code == 0
    assert "child" not in fork.log.read_text()
    assert fork.log.read_text() == plain.log.read_text()
    assert read_record(tmp_path / "forked") == read_record(tmp_path / "plain")


@pytest.mark.parametrize("name", ["trainer", "bare loop"])
def test_a_forked_process_that_exits_does_not_end_the_parents_run(name, tmp_path):
    fork = run_and_fork(name, tmp_path, end_with_system_exit)
    assert fork.exit_code == 7
    assert "child" not in fork.log.read_text()
    status, lost, _, events, _ = read_record(tmp_path)
    assert (status, lost) == ("completed", 0)
    assert events.count("end") == 1


def test_calls_on_the_session_do_nothing_in_a_forked_process(tmp_path):
    model, optimizer = make()
    (x, y), *_ = batches(1)
    seen: list[int] = []
    zero = hookline.probes.Edit("second", "ablate", enable_intervention=True)
    session = hookline.attach(model, optimizer, hooks=[zero], runs=tmp_path / "runs")

    def go_on() -> None:
        assert model(x).abs().sum() > 0  # without the edit
        session.add_hook(lambda activations: seen.append(1), kind="forward")
        session.backward(F.mse_loss(model(x), y))
        session.updates()
        optimizer.step()
        session.log("a", 1.0)
        session.save_checkpoint(tmp_path / "given")
        session.detach()
        run = session.run
        run.log(9, 0, "b", 1.0)
        run.log(9, 0, "c", torch.zeros(3, 4, 4), "image")
        run.event("d")
        run.update(name="e")
        run.flush(durable=True)
        run.rewind({"step": 0})
        run.close("error")
        assert not seen

    with session:
        for _ in range(2):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            run_in_fork(go_on)
    status, lost, metrics, events, saved = read_record(tmp_path)
    assert (status, lost, saved) == ("completed", 0, [])
    assert metrics == [(1, "train/loss"), (2, "train/loss")]
    assert events == ["start", "end"]
    assert not (tmp_path / "given").exists()
    assert not (session.run.path / "media").exists()


def test_a_loop_that_has_not_begun_may_be_trained_by_a_forked_process(tmp_path):
    model, optimizer = make()
    session = hookline.attach(model, optimizer, runs=tmp_path / "runs")

    def train() -> None:
        with session:
            for x, y in session.batches(batches(3)):
                F.mse_loss(model(x), y).backward()
                optimizer.step()

    run_in_fork(train)
    assert read_record(tmp_path)[2] == [(1, "train/loss"), (2, "train/loss"), (3, "train/loss")]


class ModelInWorkers(Dataset):  # type: ignore[type-arg]
    """Samples that workers compute with the model that is trained."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.enable_grad():
            return self.model(torch.ones(8)).detach() * 0 + os.getpid()


def test_workers_of_a_loader_call_no_hooks_of_the_loop(tmp_path):
    calls = tmp_path / "calls"

    class Calls(hookline.Hook):
        def on_before_forward(self) -> None:
            with calls.open("a") as file:
                file.write(f"{os.getpid()}\n")

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Calls()]) as session:
        session.begin()
        for batch in DataLoader(ModelInWorkers(model), num_workers=2):
            assert batch.unique().item() != os.getpid()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    assert calls.read_text().split() == [str(os.getpid())] * 4
