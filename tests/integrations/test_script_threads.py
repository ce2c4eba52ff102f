"""A script that trains in several threads at once has a run of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hookline import open_run
from hookline.integrations.scripts.run_settings import RunSettings

SCRIPT = """
import threading, torch
both_train = threading.Barrier(2)
def train(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(20):
        both_train.wait()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_training_runs_in_two_threads_are_both_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = RunSettings(hooks=[{"name": "lr_monitor"}], runs=str(tmp_path / "runs"))
    with monkeypatch.context() as patched:
        for name, value in settings.environment(
            {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        ).items():
            patched.setenv(name, value)
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    runs = [open_run(each) for each in (tmp_path / "runs").iterdir()]
    names = [{row["step"] for row in run.metrics("train/loss")} for run in runs]
    assert len(names) == 2
    for steps in names:  # a loop is recognised when its thread has stepped a few times
        assert len(steps) >= 15
    assert done.stderr.count("Hooks are called from step") == sum(len(one) < 20 for one in names)
