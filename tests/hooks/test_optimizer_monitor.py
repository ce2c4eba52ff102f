"""OptimizerMonitor with all kinds of optimizers and parameters, against a naive reference."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline.runs.jsonl_reader import read_records

Values = dict[tuple[int, str], float]


class OddModel(nn.Module):
    """Parameters of all kinds: tied, frozen, unused, empty, scalar, complex, of half precision."""

    def __init__(self, *, sparse: bool = False, complex_too: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4, sparse=sparse)
        self.linear = nn.Linear(4, 4)
        self.half_linear = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.double_linear = nn.Linear(4, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        if complex_too:
            self.rotation = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.head = nn.Linear(4, 7, bias=False)
        if not sparse:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = self.linear(x) * self.scale + self.frozen.sum()
        x = self.half_linear(x.bfloat16()).float()
        x = self.double_linear(x.double()).float()
        if hasattr(self, "rotation"):
            x = (x * self.rotation).abs()
        return self.head(x + self.nothing.sum())


class Reference(hookline.Hook):
    """Measures each step as simply as possible, in float64."""

    def __init__(self) -> None:
        self.expected: Values = {}
        self._before: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self._before[name] = parameter.detach().clone()

    def on_after_optimizer_step(self, model: nn.Module, optimizers: Any, step: int) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for name, parameter in model.named_parameters():
                    if any(parameter is one for one in group["params"]):
                        self._measure(name, parameter, group, optimizer.state[parameter], step + 1)

    def _measure(self, name: str, parameter: Any, group: Any, state: Any, step: int) -> None:
        if parameter.grad is None or not parameter.numel():
            return
        change = (parameter.detach() - self._before[name]).to(torch.complex128).norm().item()
        weight = self._before[name].to(torch.complex128).norm().item()
        gradient = parameter.grad.to_dense().to(torch.complex128).norm().item()
        self.expected[step, f"optimizer/{name}/update_ratio"] = change / weight
        if gradient:
            self.expected[step, f"optimizer/{name}/effective_lr"] = change / gradient
        moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq", state.get("square_avg")))
        is_plain = not parameter.is_complex() and not parameter.grad.is_sparse
        if moment is None or moment.shape != parameter.shape or not is_plain:
            return
        moment = moment.double()
        if "betas" in group and "exp_avg_sq" in state:
            moment = moment / (1 - group["betas"][1] ** float(state["step"]))
        least = group["eps"] ** 2 if isinstance(group["eps"], float) else 0.0
        squares = parameter.grad.double().square() / moment.clamp(min=max(least, 1.18e-38))
        self.expected[step, f"optimizer/{name}/rms_ratio"] = math.sqrt(squares.mean().item())


def train(folder: Path, model: nn.Module, optimizers: Any, **options: Any) -> tuple[Values, Values]:
    """Return what the monitor has logged of each parameter, and what was expected."""
    reference = Reference()
    hooks = [reference, hookline.OptimizerMonitor(1)]
    config = hookline.TrainerConfig(runs=folder, progress="off", **options)
    loss_fn: Any = nn.functional.cross_entropy
    trainer = hookline.Trainer(config, model, optimizers, loss_fn=loss_fn, hooks=hooks)
    generator = torch.Generator().manual_seed(1)
    data = [tuple(torch.randint(0, 7, (2, 6), generator=generator)) for _ in range(4)]
    trainer.fit(data)
    assert trainer.hooks.summary().failures == {}
    records = read_records(trainer.run.path / "metrics.jsonl")
    logged = {
        (one["step"], one["name"]): one["value"]
        for one in records
        if one["name"].startswith("optimizer/") and "/total/" not in one["name"]
    }
    return logged, reference.expected


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups of parameters with different options."""
    first, *others = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [first], "lr": 0.1}, {"params": others, "betas": (0.8, 0.9), "eps": 1e-3}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.AdamW(in_groups(model), lr=0.01, betas=(0.9, 0.95)),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_odd_parameters_are_measured_as_a_naive_reference_does(name, tmp_path) -> None:
    model = OddModel()
    found, expected = train(tmp_path, model, OPTIMIZERS[name](model))
    assert found.keys() == expected.keys()
    assert not any("nothing" in key[1] or "unused" in key[1] for key in found)
    assert found == pytest.approx(expected, rel=1e-2)  # as precise as half precision is
    single = {key: value for key, value in expected.items() if "half" not in key[1]}
    assert {key: found[key] for key in single} == pytest.approx(single, rel=1e-3)
    has_ratio = name not in ("Adagrad", "SGD")
    assert any(key[1].endswith("rms_ratio") for key in found) is has_ratio


@pytest.mark.parametrize("name", ["fused", "Adafactor", "transformers"])
def test_optimizers_for_real_parameters_are_measured(name, tmp_path) -> None:
    model = OddModel(complex_too=False)
    parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
    if name == "fused":
        optimizer: Any = torch.optim.AdamW(parameters, lr=0.01, fused=True)
    elif name == "Adafactor":
        optimizer = torch.optim.Adafactor(parameters, lr=0.01)
    else:  # has two values as epsilon, and a second moment of each element for vectors only
        kind = pytest.importorskip("transformers.optimization").Adafactor
        optimizer = kind(parameters, lr=0.01, relative_step=False, scale_parameter=False)
    found, expected = train(tmp_path, model, optimizer)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-2)


def test_sparse_gradients_are_measured(tmp_path) -> None:
    model = OddModel(sparse=True)
    sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01)
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if "embedding" not in n])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = train(tmp_path, model, [sparse, dense])
    expected = {key: value for key, value in expected.items() if key in found}
    assert (1, "optimizer/embedding.weight/effective_lr") in found
    assert (1, "optimizer/embedding.weight/rms_ratio") not in found
    assert (1, "optimizer/head.weight/rms_ratio") in found
    last = {key: value for key, value in expected.items() if "head" in key[1]}
    assert {key: found[key] for key in last} == pytest.approx(last, rel=1e-3)
