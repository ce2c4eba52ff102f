"""Trackers beside the program's own use of W&B and MLflow."""

from __future__ import annotations

import json

import pytest
from test_trackers import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Return what the tools' own readers have read."""
    root = tmp_path_factory.mktemp("beside")
    run_script("tracked_beside.py", root)
    return json.loads((root / "read.json").read_text())


def test_two_loops_at_the_same_time_have_a_run_of_wandb_each(read):
    rows = read["loops_at_the_same_time"]
    losses = {name: [row for row in rows[name] if row[1:] == ["train/loss"]] for name in rows}
    assert [step for step, _ in losses["first"]] == [1, 2, 3]
    assert [step for step, _ in losses["second"]] == [1, 2, 3, 4]
    own = [row for row in rows["first"] if row[1:] == ["own"]]
    assert [step for step, _ in own] == [0, 1, 2]  # in the run that `wandb.run` was


def test_a_run_of_wandb_that_the_program_has_started_is_used_and_left_open(read):
    found = read["run_of_the_program"]
    assert found["active"]
    assert found["ids"] == [True, True]
    expected = [[1, "train/loss"], [1, "train/loss"], [None, "late"], [None, "own"]]
    assert sorted(found["rows"], key=str) == sorted(expected, key=str)


def test_an_active_run_of_mlflow_is_used_and_left_open(read):
    found = read["active_mlflow_run"]
    assert found["same"]
    assert found["status"] == "RUNNING"
    assert found["params"] == ["5", "1"]
    assert {"own", "train/loss", "train/loss_epoch"} <= set(found["metrics"])
