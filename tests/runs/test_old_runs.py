"""Runs that an earlier version wrote half of are continued, bit for bit, in every loop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from old_runs import EPOCHS, LOOPS, LOOPS_OF_RANKS, STEPS_PER_EPOCH, start
from safetensors.torch import load_file

from hookline import open_run

DATA = Path(__file__).parent / "old_runs_data"
STEPS = list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs, each trained to its end."""
    folder = tmp_path_factory.mktemp("old") / "runs"
    shutil.copytree(DATA, folder)
    start(folder, *LOOPS)
    start(folder, *LOOPS_OF_RANKS)
    return folder


@pytest.mark.parametrize("loop", [*LOOPS, *LOOPS_OF_RANKS])
def test_an_old_run_is_continued_bit_for_bit(loop: str, continued: Path) -> None:
    expected = load_file(continued / loop / "expected.safetensors")
    ended = load_file(continued / loop / "ended.safetensors")
    assert ended.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ended[name], value), name
    assert json.loads((continued / loop / "steps.json").read_text()) == STEPS


@pytest.mark.parametrize("loop", [*LOOPS, *LOOPS_OF_RANKS])
def test_the_record_of_an_old_run_goes_on(loop: str, continued: Path) -> None:
    (folder,) = (continued / loop / "runs").iterdir()
    run = open_run(folder)
    assert run.status == "completed"
    assert [record["step"] for record in run.metrics("train/loss")] == STEPS
