"""OutlierMonitor and LogitMonitor with odd outputs, against naive references."""

from __future__ import annotations

import math
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline
from hookline.runs.jsonl_reader import read_records

# -- OutlierMonitor -------------------------------------------------------------------------------


class Output(nn.Module):
    """Returns the same value in each call."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Any:
        return self.value


def measure(output: Any, module: nn.Module | None = None, **options: Any) -> dict[str, float]:
    """Return what is measured of an output, or of a module's output for an input."""
    monitor = hookline.OutlierMonitor("layer", **options)
    model = nn.ModuleDict({"layer": Output(output) if module is None else module})
    with monitor.attach(model):
        if module is None:
            model["layer"]()
        else:
            model["layer"](output)
    return monitor.report().get("layer", {})


def expected_of(rows: Tensor, samples: int = 128, tau: float = 0.025) -> dict[str, float]:
    """Measure positions by units, each measure by its definition."""
    rows = rows.detach().double()
    size = rows.abs()
    median = sorted(size.flatten().tolist())[(rows.numel() - 1) // 2]
    score = size.mean(0) / size.mean()
    z = (rows - rows.mean()) / rows.std(correction=0)
    used = rows[:: -(-len(rows) // samples)]
    singular = torch.linalg.svdvals(used)
    share = [s / singular.sum().item() for s in singular.tolist() if s]
    return {
        "abs_max": size.max().item(),
        "massive": sum(v > 100 and v > 1000 * median for v in size.flatten().tolist()),
        "kurtosis": z.pow(4).mean().item(),
        "dead": sum(not column.any() for column in rows.unbind(1)) / rows.shape[1],
        "dormant": sum(s <= tau for s in score.tolist()) / rows.shape[1],
        "effective_rank": math.exp(-sum(s * math.log(s) for s in share)),
    }


def odd_features(positions: int, units: int, size: float = 1.0) -> Tensor:
    """Return features with an outlier, and with a dead and a dormant unit."""
    torch.manual_seed(0)
    rows = torch.randn(positions, units)
    rows[:, 0] = 0.0
    rows[:, 1] *= 1e-3
    rows[0, 2] = 5000.0
    return rows * size


@pytest.mark.parametrize("batch", [(), (1,), (4,)])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(2, 4, 3), (2, 8)),
        (nn.Conv2d(2, 4, 3), (2, 8, 8)),
        (nn.ConvTranspose2d(2, 4, 3), (2, 8, 8)),
        (nn.Conv3d(2, 4, 3), (2, 8, 8, 8)),
        (nn.InstanceNorm1d(4, affine=True), (4, 8)),
        (nn.InstanceNorm2d(4, affine=True), (4, 8, 8)),
    ],
)
def test_channels_are_found_also_where_there_is_no_batch(module, shape, batch):
    with torch.no_grad():
        module.bias[:] = torch.tensor([1.0, 0, 0, 0])
        module.weight[:] = 0
    assert measure(torch.randn(*batch, *shape), module)["dead"] == 0.75


@pytest.mark.parametrize("piece", [16, 1 << 22])
@pytest.mark.parametrize("shape", [(300, 8), (2, 8), (1, 8)], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e12, 1e-12])
def test_outliers_of_all_sizes_in_large_and_tiny_batches(shape, size, piece, monkeypatch) -> None:
    monkeypatch.setattr("hookline.hooks.monitoring.outlier_monitor._PIECE", piece)
    rows = odd_features(*shape, size)
    assert measure(rows) == pytest.approx(expected_of(rows), rel=1e-3)


def test_nothing_is_infinite_or_divided_by_zero() -> None:
    zeros = measure(torch.zeros(4, 3))
    assert math.isnan(zeros.pop("kurtosis"))
    expected = {"abs_max": 0, "massive": 0, "dead": 1, "dormant": 1, "effective_rank": 0}
    assert zeros == expected
    constant = measure(torch.full((4, 3), 3.3))
    assert math.isnan(constant["kurtosis"])
    assert constant["effective_rank"] == pytest.approx(1)
    for value in (math.nan, math.inf, -math.inf):
        rows = torch.randn(4, 3)
        rows[1, 2] = value
        assert all(math.isnan(number) for number in measure(rows).values())


def fit(folder: Path, model: nn.Module, *hooks: Any, **options: Any) -> dict[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = hookline.TrainerConfig(runs=folder, progress="off")
    trainer = hookline.Trainer(config, model, optimizer, hooks=hooks, **options)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(5, 3, generator=generator), torch.randint(0, 2, (5,), generator=generator))
        for _ in range(3)
    ]
    trainer.fit(data)
    assert trainer.hooks.summary().failures == {}
    records = read_records(trainer.run.path / "metrics.jsonl")
    return {(one["step"], one["name"]): one["value"] for one in records}


@pytest.mark.parametrize("name", ["outlier_monitor", "logit_monitor"])
def test_values_of_a_step_are_not_logged_with_a_later_one(name, tmp_path) -> None:
    class Toggle(hookline.Hook):
        """Disables the hook within step 1, and enables it within step 2."""

        def on_before_backward(self, step: int, trainer: Any) -> None:
            (trainer.disable_hook if step == 0 else trainer.enable_hook)(name)

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    hook = hookline.OutlierMonitor(log_frequency=1)
    if name == "logit_monitor":
        hook = hookline.LogitMonitor(1)
    found = fit(tmp_path, model, Toggle(), hook)
    prefix = "activations/" if name == "outlier_monitor" else "logits/"
    assert {step for step, key in found if key.startswith(prefix)} == {3}


# -- LogitMonitor ---------------------------------------------------------------------------------

Pair = namedtuple("Pair", "logits hidden")
SHAPES = {2: (5, 4), 3: (5, 2, 4), 4: (5, 4, 2, 3), 5: (2, 4, 2, 2, 2)}


class Returning(nn.Module):
    """A classifier that returns its logits in a given form."""

    def __init__(self, shape: tuple[int, ...], form: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter(torch.randn(shape) * 3)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.logits)


def logit_values(folder: Path, model: nn.Module, **options: Any) -> dict[str, float]:
    def step(model: nn.Module, batch: Any) -> Tensor:
        model(batch[0])
        return next(model.parameters()).sum()

    found = fit(folder, model, hookline.LogitMonitor(1, **options), step_fn=step)
    return {
        name.removeprefix("logits/"): value
        for (step_, name), value in found.items()
        if step_ == 1 and name.startswith("logits/")
    }


def expected_logits(logits: Tensor, dim: int) -> dict[str, float]:
    rows = logits.detach().double().movedim(dim, -1).reshape(-1, logits.shape[dim])
    p = rows.softmax(-1)
    top = rows.sort(-1).values
    log_z = rows.exp().sum(-1).log()
    entropy = torch.special.entr(p).sum(-1)
    return {
        "log_z": log_z.mean().item(),
        "log_z_abs_max": log_z.abs().max().item(),
        "entropy": entropy.mean().item(),
        "margin": (top[:, -1] - top[:, -2]).mean().item(),
    }


@pytest.mark.parametrize("ndim", SHAPES)
def test_classes_are_last_or_those_of_pixels(ndim, tmp_path) -> None:
    model = Returning(SHAPES[ndim], lambda logits: logits)
    expected = expected_logits(model.logits, 1 if ndim > 3 else -1)
    assert logit_values(tmp_path, model) == pytest.approx(expected, rel=1e-5)
    model = Returning(SHAPES[ndim], lambda logits: logits)
    expected = expected_logits(model.logits, 0)
    assert logit_values(tmp_path, model, class_dim=0) == pytest.approx(expected, rel=1e-5)


FORMS: dict[str, Any] = {
    "a mapping": lambda logits: {"loss": logits.sum(), "logits": logits},
    "a named tuple": lambda logits: Pair(logits, torch.zeros(3, 3)),
    "a tuple that begins with the loss": lambda logits: (logits.sum(), logits, torch.zeros(3, 3)),
    "a list": lambda logits: [logits, logits.sum()],
    "half precision": lambda logits: logits.bfloat16().float().bfloat16(),
    "a vocabulary that is filled up": lambda logits: F.pad(logits, (0, 3), value=-math.inf),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_found(form, tmp_path) -> None:
    model = Returning((5, 4), FORMS[form])
    shown = model.logits.bfloat16() if form == "half precision" else model.logits
    expected = expected_logits(shown, -1)
    assert logit_values(tmp_path, model) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("form", "options", "text"),
    [
        (lambda x: x, {"class_dim": 3}, "classes along class_dim=3"),
        (lambda x: x, {"class_dim": -3}, "classes along class_dim=-3"),
        (lambda x: x[:, :1], {}, "found no logits"),
        (lambda x: x.sum(), {}, "found no logits"),
        (lambda x: x.long(), {}, "found no logits"),
        (lambda x: x[:0], {}, "found no logits"),
        (lambda x: {"hidden": x}, {}, "found no logits"),
        (lambda x: None, {}, "found no logits"),
    ],
)
def test_what_has_no_logits_is_said_once(form, options, text, tmp_path, caplog) -> None:
    assert logit_values(tmp_path, Returning((5, 4), form), **options) == {}
    warnings = [one.message for one in caplog.records if "LogitMonitor" in one.message]
    assert len(warnings) == 1
    assert text in warnings[0]
