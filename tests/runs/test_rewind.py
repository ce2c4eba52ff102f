"""A run that continues from a checkpoint has each record once, whatever happened before."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import hookline
from hookline.runs import OpenedRun, Run, open_run


def values(path: Path, **options: Any) -> list[Any]:
    return [row["value"] for row in open_run(path).metrics(**options)]


def write(run: Run, steps: range, sign: int = 1) -> None:
    for step in steps:
        run.log(step, 0, "x", sign * step)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, config={}, seed=0, hooks=[])


def test_records_behind_the_position_move_to_another_file(run: Run) -> None:
    write(run, range(1, 4))
    position = run.position()
    assert values(run.path) == [1, 2, 3]  # they are on the disk
    write(run, range(4, 7))
    run.close("interrupted")
    again = Run.open(run.path, resume=True, position=position)
    assert values(run.path) == [1, 2, 3]
    write(again, range(4, 6), -1)
    again.close()
    assert values(run.path) == [1, 2, 3, -4, -5]
    assert values(run.path, repeated=True) == [4, 5, 6, 1, 2, 3, -4, -5]
    assert open_run(run.path).damage == []
    assert open_run(run.path).results()["x"].count == 5


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_where_only_the_step_is_known_its_records_stay(run: Run, step: int, kept: Any) -> None:
    run.log(0, 0, "note", "before the first step", kind="text")
    write(run, range(1, 4))
    run.close()
    Run.open(run.path, resume=True, position={"step": step}).close()
    assert values(run.path) == ["before the first step", *kept]


def test_a_partial_last_line_is_no_obstacle(run: Run) -> None:
    write(run, range(1, 3))
    position = run.position()
    write(run, range(3, 5))
    run.close()
    for extra in (5, 6):
        with (run.path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"v": 1, "step": 99')  # what a kill leaves
        again = Run.open(run.path, resume=True, position=position)
        assert values(run.path) == [1, 2]
        write(again, range(extra, extra + 1))
        again.close()
    assert values(run.path) == [1, 2, 6]
    assert values(run.path, repeated=True) == [3, 4, 5, 1, 2, 6]


def test_a_log_that_is_shorter_than_the_position_is_reported_and_kept(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    write(run, range(1, 4))
    position = run.position()
    run.close()
    log = run.path / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    Run.open(run.path, resume=True, position=position).close()
    assert f"but {position['metrics']} when the checkpoint was saved" in caplog.text
    assert caplog.records[0].levelname == "ERROR"
    assert values(run.path) == [1, 2]


def test_events_are_never_moved(run: Run) -> None:
    position = run.position()
    run.event("checkpoint", step=3)
    run.close()
    Run.open(run.path, resume=True, position=position).close()
    assert [event["step"] for event in open_run(run.path).events("checkpoint")] == [3]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-4, 3), max_size=25), st.booleans())
def test_any_sequence_of_rewinds_gives_the_records_of_the_position(
    tmp_path_factory: pytest.TempPathFactory, actions: list[int], reopens: bool
) -> None:
    """A positive number logs that many records; others rewind to one of the positions so far."""
    run = Run.create(tmp_path_factory.mktemp("runs"), config={}, seed=0, hooks=[])
    logged: list[int] = []
    positions = [(run.position(), list(logged))]
    total = 0
    for action in actions:
        if action > 0:
            for _ in range(action):
                run.log(0, 0, "x", total := total + 1)
                logged.append(total)
            positions.append((run.position(), list(logged)))
            continue
        position, expected = positions[action % len(positions)]
        logged = list(expected)
        if reopens:
            run.close()
            run = Run.open(run.path, resume=True, position=position)
        else:
            run.rewind(position)
        assert values(run.path) == logged
    run.close()
    assert values(run.path) == logged
    assert set(values(run.path, repeated=True)) == set(range(1, total + 1))  # nothing is lost


# -- kills ----------------------------------------------------------------------------------------

KILLED = """
import os, shutil, sys
from pathlib import Path
from hookline.runs import Run, manifest, open_run

manifest.read_git_state = lambda: {}  # faster

def values(path, **options):
    return [row["value"] for row in open_run(path).metrics(**options)]

def log(run, first, last):
    for step in range(first, last):
        run.log(step, 0, "x", step)

def resume(path, position, calls):
    '''Resume in a process that is killed at a system call; return whether it got so far.'''
    child = os.fork()
    if child == 0:
        def killed(call):
            def counted(*arguments, **options):
                nonlocal calls
                calls -= 1
                if calls < 0:
                    if call is write and arguments[1]:
                        write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os._exit(9)
                return call(*arguments, **options)
            return counted
        write = os.write
        for name in ("write", "ftruncate", "fsync", "rename", "replace"):
            setattr(os, name, killed(getattr(os, name)))
        Run.open(path, resume=True, position=position)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

root = Path(sys.argv[1])
run = Run.create(root, config={}, seed=0, hooks=[])
log(run, 1, 4)
early = run.position()
log(run, 4, 9)
late = run.position()
log(run, 9, 11)
run.close()
states = {"simple": (early, [1, 2, 3])}
shutil.copytree(run.path, root / "simple")
again = Run.open(run.path, resume=True, position=early)
log(again, 11, 14)
again.close()
shutil.copytree(run.path, root / "restoring")
states["restoring"] = (late, [1, 2, 3, 4, 5, 6, 7, 8])
for name, (position, expected) in states.items():
    kills = 0
    while True:
        path = root / f"{name}-{kills}"
        shutil.copytree(root / name, path)
        before = values(path, repeated=True)
        was_killed = resume(path, position, kills)
        if name == "simple":
            assert values(path) in ([*range(1, 11)], expected), (kills, values(path))
        assert set(values(path, repeated=True)) == set(before), kills
        final = Run.open(path, resume=True, position=position)
        assert values(path) == expected, (kills, values(path))
        log(final, 20, 22)
        final.close()
        assert values(path) == [*expected, 20, 21]
        repeated = values(path, repeated=True)
        assert set(repeated) == {*before, 20, 21}
        if name == "simple":
            assert len(repeated) == len(set(repeated)), (kills, repeated)
        shutil.rmtree(path)
        if not was_killed:
            break
        kills += int(sys.argv[2])
    print(name, kills)
"""


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.soak), 4], ids=["all of them", "each fourth"]
)
def test_a_kill_at_any_system_call_loses_and_doubles_nothing(tmp_path: Path, every: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(every)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kills = dict(line.split() for line in result.stdout.splitlines())
    assert int(kills["simple"]) > 8
    assert int(kills["restoring"]) > int(kills["simple"])


# -- training -------------------------------------------------------------------------------------


class Saves(hookline.Hook):
    def __init__(self, *steps: int, dies_at: int = 0) -> None:
        self.steps, self.dies_at = steps, dies_at

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.dies_at:
            raise KeyboardInterrupt
        if step in self.steps:
            trainer.save_checkpoint()


def train(runs: Path, *hooks: hookline.Hook, resume_from: Any = None) -> OpenedRun:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    config = hookline.TrainerConfig(runs=runs, progress="off", seed=1, max_epochs=3)
    trainer = hookline.Trainer(
        config,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.mse_loss,
        hooks=hooks,
    )
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True
    )
    with suppress(KeyboardInterrupt):
        trainer.fit(loader, val_loaders=loader, resume_from=resume_from)
    return open_run(trainer.run.path)


def records(run: OpenedRun) -> list[Any]:
    return [(row["step"], row["epoch"], row["name"], row["value"]) for row in run.metrics()]


@pytest.mark.parametrize(("saved", "dies_at"), [(2, 4), (4, 6), (4, 12), (5, 9), (8, 11)])
def test_a_resumed_training_has_the_records_of_an_uninterrupted_one(
    tmp_path: Path, saved: int, dies_at: int
) -> None:
    """Steps 4 and 8 are the last of their epochs: their checkpoints precede the validation."""
    expected = records(train(tmp_path, Saves(99)))
    first = train(tmp_path, Saves(saved, dies_at=dies_at))
    again = train(tmp_path, Saves(99), resume_from=first.path)
    assert again.path == first.path
    assert records(again) == expected
    assert max(Counter((step, name) for step, _, name, _ in records(again)).values()) == 1
    assert len(again.metrics(repeated=True)) > len(expected)


def test_a_checkpoint_without_a_position_continues_behind_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = records(train(tmp_path, Saves(99)))
    state_dict = hookline.Trainer.state_dict
    with monkeypatch.context() as patch:  # as older versions saved it
        patch.setattr(
            hookline.Trainer,
            "state_dict",
            lambda trainer: {k: v for k, v in state_dict(trainer).items() if k != "run"},
        )
        first = train(tmp_path, Saves(5, dies_at=9))
    assert records(train(tmp_path, Saves(99), resume_from=first.path)) == expected
