"""Diagnostics of compiled models, and with a scaler: the numbers of the plain training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_diagnostics import Values, all_of_them, encoder, fit
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.runs.jsonl_reader import read_records

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler

MEASURED = ("optimizer/", "gradient_noise/", "activations/", "logits/", "sharpness/")


def data(n: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randn(2, 3, 5, 8, generator=generator)) for _ in range(n)]


def train(folder: Path, how: str) -> Values:
    model, optimizer = encoder()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if how == "in place":
        model.compile(backend="eager")
    elif how == "layer":
        model[1].compile(backend="eager")
    wrapped = torch.compile(model, backend="eager") if how == "wrapped" else model
    hooks = all_of_them()
    return fit(folder, *hooks, parts=(wrapped, optimizer), data=data(), accumulate=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Values:
    return train(tmp_path_factory.mktemp("plain"), "not")


@pytest.mark.parametrize("how", ["wrapped", "in place", "layer"])
def test_a_compiled_model_has_the_same_numbers(how, plain, tmp_path, caplog) -> None:
    torch._dynamo.reset()
    found = train(tmp_path, how)
    measured = {key: value for key, value in plain.items() if key[1].startswith(MEASURED)}
    compiled = {key: value for key, value in found.items() if key[1].startswith(MEASURED)}
    assert compiled.keys() == measured.keys()
    for key, value in measured.items():
        tolerance = {"rel": 2e-2, "abs": 1e-2} if "sharpness" in key[1] else {"rel": 1e-3}
        assert compiled[key] == pytest.approx(value, **tolerance), key
    assert not any(name.startswith("attention/") for _, name in found)
    warnings = [one.message for one in caplog.records if "AttentionMonitor" in one.message]
    assert len(warnings) == 1
    assert "saw no attention in '1.self_attn': they are compiled" in warnings[0]


# -- with a scaler --------------------------------------------------------------------------------


def in_bare_loop(folder: Path, scale: float | None, *hooks: hookline.Hook) -> Values:
    """Train with micro-batches, with a scaler if there is a scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    generator = torch.Generator().manual_seed(1)
    with hookline.attach(model, optimizer, scaler=scaler, hooks=hooks, runs=folder) as session:
        for _ in range(3):
            for _ in range(2):
                x, y = torch.randn(4, 12, generator=generator).split([8, 4], 1)
                scaler.scale(F.mse_loss(model(x), y) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        path = session.run.path
    records = read_records(path / "metrics.jsonl")
    return {(one["step"], one["name"]): one["value"] for one in records}


def test_a_scaler_changes_no_numbers(tmp_path) -> None:
    def hooks() -> list[hookline.Hook]:
        noise = hookline.GradientNoiseScale(1, batch_size=4)
        return [hookline.OptimizerMonitor(1), noise, hookline.LogitMonitor(1)]

    expected = in_bare_loop(tmp_path / "plain", None, *hooks())
    found = in_bare_loop(tmp_path / "scaled", 2.0**12, *hooks())
    expected, found = (
        {key: value for key, value in values.items() if key[1].startswith(MEASURED)}
        for values in (expected, found)
    )
    assert {"optimizer/total/effective_lr", "gradient_noise/variance"} < {n for _, n in found}
    assert found == pytest.approx(expected, rel=1e-4)
