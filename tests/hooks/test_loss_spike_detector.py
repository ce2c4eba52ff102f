"""LossSpikeDetector: which losses are spikes, which batch they came from, and how much is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hookline


def detect(losses: list[float], **options: Any) -> list[dict[str, Any]]:
    """Return the spikes in these losses, each of one step."""
    options = {"window": 20, "min_steps": 5, "steps_after": 3, **options}
    detector = hookline.LossSpikeDetector(**options)
    for step, loss in enumerate(losses, 1):
        detector.on_step_end(step, hookline.LazyFloat(loss), {"current_epoch": 0}, None)
    detector.on_train_end(len(losses), None)
    return detector.spikes


def steps_of(losses: list[float], **options: Any) -> list[int]:
    return [spike["step"] for spike in detect(losses, **options)]


NOISE = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 0.98, 1.1, 0.9]


def test_a_loss_is_compared_with_the_median_before_it() -> None:
    (spike,) = detect([*NOISE, 3.0, 4.0, 2.0, *NOISE])
    before = sorted(NOISE)
    center = (before[4] + before[5]) / 2
    distances = sorted(abs(loss - center) for loss in NOISE)
    deviation = 1.4826 * (distances[4] + distances[5]) / 2
    assert spike["step"] == 11
    assert spike["z"] == pytest.approx((3.0 - center) / deviation)
    assert (spike["median"], spike["deviation"]) == pytest.approx((center, deviation))
    assert (spike["peak"], spike["peak_step"]) == (4.0, 12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_until_it_recovers(bad) -> None:
    assert steps_of([bad]) == [1]  # also before there is a window
    assert steps_of([*NOISE, bad, *NOISE]) == [11]
    assert steps_of([*NOISE, *[bad] * 200, *NOISE, 9.0]) == [11, 221]
    (spike,) = detect([*NOISE, 5.0, math.nan, math.inf, 9.0])
    assert math.isnan(spike["peak"])
    assert spike["peak_step"] == 12


def test_what_is_kept_is_bounded() -> None:
    losses: list[float] = []
    for _ in range(300):
        losses += [*NOISE, 50.0]
    detector = hookline.LossSpikeDetector(window=20, min_steps=5, steps_after=3)
    for step, loss in enumerate(losses, 1):
        detector.on_step_end(step, hookline.LazyFloat(loss), {}, None)
    assert len(detector.spikes) == 100
    assert len(json.dumps(detector.state_dict())) < 50_000


# -- the batches of a spike -----------------------------------------------------------------------

BAD = 33


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from samples(0)


def samples(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(64, 1, generator=generator)
    if seed == 0:
        y[BAD] = 1000.0
    return TensorDataset(torch.randn(64, 4, generator=generator), y)


def find_batches(folder: Path, data: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the batches of the one spike that these data have."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    config = hookline.TrainerConfig(runs=folder, progress="off", seed=5, **options)
    detector = hookline.LossSpikeDetector(1000.0, window=8, min_steps=4)
    loss: Any = nn.functional.mse_loss
    trainer = hookline.Trainer(config, model, optimizer, loss_fn=loss, hooks=[detector])
    trainer.fit(data)
    assert trainer.hooks.summary().failures == {}
    (event,) = [
        one for one in hookline.open_run(trainer.run.path).events() if one["kind"] == "loss_spike"
    ]
    return list(event["batches"])


class ReverseSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(63, -1, -1))

    def __len__(self) -> int:
        return 64


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "how", ["shuffled", "sampler", "batch sampler", "workers", "several", "iterable", "list"]
)
def test_indices_are_those_of_the_step(how, accumulate, tmp_path) -> None:
    dataset = samples(0)
    loader: Any = DataLoader(dataset, batch_size=2, shuffle=True)
    name = "train"
    if how == "sampler":
        loader = DataLoader(dataset, batch_size=2, sampler=ReverseSampler())
    elif how == "batch sampler":
        batches = torch.utils.data.BatchSampler(ReverseSampler(), 2, drop_last=True)
        loader = DataLoader(dataset, batch_sampler=batches)
    elif how == "workers":
        loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=2)
    elif how == "several":
        others = DataLoader(samples(1), batch_size=2, shuffle=True)
        loader, name = {"others": others, "bad": DataLoader(dataset, batch_size=2)}, "bad"
    elif how == "iterable":
        loader = DataLoader(Samples(), batch_size=2)
    elif how == "list":
        loader = list(loader)
    found = find_batches(tmp_path, loader, accumulate=accumulate)
    assert len(found) == accumulate
    if how in ("iterable", "list"):
        assert [one["indices"] for one in found] == [None] * accumulate
        return
    assert any(BAD in one["indices"] and name in one["loader"] for one in found)
    assert all(len(one["indices"]) == 2 for one in found)
