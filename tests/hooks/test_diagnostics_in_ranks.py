"""Diagnostics in two processes: the same values as in one, one event, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diagnostics_ranks
import pytest
from diagnostics_ranks import OUTLIER, logged, train
from rank_checks import run_ranks

import hookline


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the first of two processes logged; comparisons of ranks are made there."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(diagnostics_ranks.__file__).name, folder)
    return dict(json.loads((folder / "found.json").read_text()))


def test_the_monitor_of_sharded_optimizers_measures_whole_parameters(found, tmp_path) -> None:
    trainer = train(tmp_path, hookline.OptimizerMonitor(1), clip_norm=0.5)
    expected = logged(trainer, "optimizer")
    assert len(expected) == 6 * 3 * 7
    assert found["optimizer"] == pytest.approx(expected, rel=1e-4)


def test_sharpness_is_that_of_the_batches_of_all_processes(found, tmp_path) -> None:
    expected = logged(train(tmp_path, hookline.Sharpness(1)), "sharpness")
    assert len(expected) == 6 * 2
    assert found["sharpness"] == pytest.approx(expected, rel=1e-2, abs=1e-3)


def test_sharpness_of_an_accumulated_step_is_that_of_its_last_batches(found, tmp_path) -> None:
    expected = logged(train(tmp_path, hookline.Sharpness(1), accumulate=2), "sharpness")
    assert found["sharpness, accumulated"] == pytest.approx(expected, rel=1e-2, abs=1e-3)


def test_the_noise_scale_is_measured_in_every_step_of_several_processes(found) -> None:
    for name, size in (("gradient_noise", 8), ("gradient_noise, accumulated", 16)):
        sizes = [v for k, v in found[name].items() if k.endswith("batch_size")]
        assert sizes == [size] * 6


def test_a_spike_in_two_processes_is_one_event(found) -> None:
    (spike,) = found["spikes"]
    assert OUTLIER in spike["batches"][0]["indices"]
    assert spike["step"] == OUTLIER // 8 + 1
