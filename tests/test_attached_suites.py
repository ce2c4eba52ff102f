"""The tool that runs other libraries' own tests with a session attached."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
import torch
from ignite.engine import Engine, Events


def make_engine():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return Engine(step)


def test_trains_twice():
    engine = make_engine()
    for _ in range(2):
        engine.run([torch.randn(3, 2)] * 4)
    assert engine.state.iteration == 4


def test_counts_handlers():
    engine = make_engine()
    engine.run([torch.randn(3, 2)])
    before = []
    handlers = engine._event_handlers[Events.STARTED]
    engine.add_event_handler(Events.STARTED, lambda: before.append(len(handlers)))
    engine.run([torch.randn(3, 2)])
    assert before == [1]


def test_fails_plain():
    assert False
"""


@pytest.mark.slow
def test_a_test_that_fails_only_with_hooks_is_named(tmp_path: Path) -> None:
    checkout, results = tmp_path / "library", tmp_path / "results"
    checkout.mkdir()
    (checkout / "test_engine.py").write_text(TESTS)
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tools")))
    command = [sys.executable, "-m", "attached_suites.run", "ignite", "--checkout", str(checkout)]
    command += ["--results", str(results), "--", "test_engine.py", "--override-ini", "addopts="]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    logs = "".join(log.read_text()[-2000:] for log in results.glob("*.log"))
    assert ended.returncode == 1, ended.stdout + ended.stderr + logs
    assert "2 tests pass plain, 2 of them with a session" in ended.stdout, ended.stdout + logs
    assert "1 of 2 pass attached" in ended.stdout
    assert "1 of 1 tests with optimizer steps end with equal weights" in ended.stdout
    assert "UNEXPECTED: test_engine.py::test_counts_handlers fails" in ended.stdout
    assert "test_fails_plain" not in ended.stdout


@pytest.mark.slow
def test_results_of_a_run_that_was_interrupted_do_not_rename_its_tests(tmp_path: Path) -> None:
    checkout, results = tmp_path / "library", tmp_path / "results"
    checkout.mkdir()
    results.mkdir()
    (checkout / "test_engine.py").write_text("def test_passes():\n    pass\n")
    (results / "ignite-plain.jsonl").write_text("")
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tools")))
    command = [sys.executable, "-m", "attached_suites.run", "ignite", "--checkout", str(checkout)]
    command += ["--results", str(results), "--", "test_engine.py", "--override-ini", "addopts="]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    logs = "".join(log.read_text()[-2000:] for log in results.glob("*.log"))
    assert "1 of 1 pass attached" in ended.stdout, ended.stdout + ended.stderr + logs
