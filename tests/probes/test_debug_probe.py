"""The debug probe: conditions, actions, and the first layer that went bad."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import batches, make, same, train, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import ConfigError, ProbeError
from hookline.probes.debug_probe import Debug, DebugProbe, Finding
from hookline.probes.flow import gradient_flow


class Layer(nn.Module):
    """Multiplies by a factor that a test may set."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.factor


class Model(nn.Module):
    def __init__(self, how: str = "plain", layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.how == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


def x_of() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)


def found(model: nn.Module, probe: DebugProbe) -> list[Finding]:
    probe.attach(model)
    model(x_of())
    probe.detach()
    return probe.findings


# -- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_module_that_went_bad_is_named_and_the_others_listed(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    model.layers[1].factor = value
    (finding,) = found(model, Debug())
    assert (finding.module, finding.condition, finding.of) == ("layers.1", "nonfinite", "output")
    assert finding.others[0] == "layers.2.linear"
    assert (finding.step, finding.call) == (None, 0)
    (record,) = caplog.records
    assert "nonfinite: the output of 'layers.1'" in record.getMessage()


@pytest.mark.parametrize(
    ("conditions", "factor", "name"),
    [
        ({"magnitude": 50}, 1e4, "magnitude above 50"),
        ({"magnitude": 50}, -1e4, "magnitude above 50"),
        ("dead", 0.0, "dead"),
        (["nonfinite", {"magnitude": 50}], 1000.0, "magnitude above 50"),
        (lambda x: x.std() > 10, 1000.0, "<lambda>"),
        (lambda x: bool(x.abs().max() > 10), 1000.0, "<lambda>"),
        (lambda x: x.abs() > 10, 1000.0, "<lambda>"),
    ],
)
def test_each_condition_finds_what_it_is_for_and_nothing_else(
    conditions: Any, factor: float, name: str
) -> None:
    model = Model()
    model.layers[1].factor = factor
    (finding,) = found(model, Debug("layers.*", conditions, action="record"))
    assert (finding.module, finding.condition) == ("layers.1", name)
    assert found(Model(), Debug("layers.*", conditions)) == []


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ("nonfinit", "'nonfinit' is not a condition. Did you mean 'nonfinite'"),
        ({"magnitude": -1}, "magnitude is -1; expected a number above 0"),
        ({"dead": 3}, "is not a condition"),
        (3, "3 is not a condition"),
        ([], "contains no condition"),
    ],
)
def test_a_wrong_condition_is_an_error_when_the_probe_is_made(
    conditions: Any, message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        Debug(conditions=conditions)


# -- gradients ------------------------------------------------------------------------------------


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * math.inf


class Bursts(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Explode.apply(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["plain", "non-reentrant"])
def test_the_first_gradient_on_the_way_back_that_went_bad_is_named(how: str) -> None:
    model = Model(how)
    model.layers[2] = Bursts()
    probe = Debug("layers.*.linear", gradients=True)
    probe.attach(model)
    out = model(x_of())
    assert probe.findings == []
    out.sum().backward()
    probe.detach()
    (finding,) = probe.findings
    assert (finding.module, finding.of) == ("layers.2.linear", "gradient")
    assert finding.others == ["layers.1.linear", "layers.0.linear"]
    assert "the gradient of the output of 'layers.2.linear'" in str(finding)


# -- actions --------------------------------------------------------------------------------------


def bad_model() -> Model:
    model = Model()
    model.layers[1].factor = math.nan
    return model


@pytest.mark.parametrize("action", ["stop", "break"])
def test_outside_of_training_and_terminals_to_stop_and_to_break_is_an_error(action: Any) -> None:
    probe = Debug(action=action)
    with pytest.raises(
        ProbeError, match=r"'debug_probe' found nonfinite: the output of 'layers\.1"
    ):
        found(bad_model(), probe)
    probe.detach()
    assert len(probe.findings) == 1


def test_to_break_in_a_terminal_starts_the_debugger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    calls: list[Any] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: calls.append(sys._getframe(1).f_locals))
    findings = found(bad_model(), Debug(action="break"))
    assert [scope["finding"] for scope in calls] == findings
    assert "Variables: self, finding" in capsys.readouterr().out


def test_a_copy_and_a_pickle_are_on_no_model_and_have_found_nothing() -> None:
    probe = Debug("layers.*", ["nonfinite", "dead", {"magnitude": 50}])
    model = bad_model()
    probe.attach(model)
    model(x_of())
    assert len(probe.findings) == 1
    for other in (copy.deepcopy(probe), copy.copy(probe), pickle.loads(pickle.dumps(probe))):
        assert (other.attachment, other.findings, other.count) == (None, [], 0)
        again = bad_model()
        (finding,) = found(again, other)
        assert (finding.module, finding.condition) == ("layers.1", "nonfinite")
        again.layers[1].factor = 1e4
        assert [one.condition for one in found(again, other)[1:]] == ["magnitude above 50"]
    assert len(probe.findings) == 1
    probe.detach()


def test_a_condition_that_lasts_is_logged_once_with_the_module_where_it_began(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = bad_model()
    with Debug("layers.*", ["nonfinite", "dead"]).attach(model) as probe:
        model(x_of())
        model.layers[0].factor = math.nan  # it spreads
        model(x_of())
        model(x_of())
        assert len(caplog.records) == 1
        assert "the output of 'layers.1'" in caplog.text
        assert len(probe.findings) == 3
        for layer in model.layers:
            layer.factor = 1.0
        model(x_of())
        model.layers[0].factor = math.nan
        model(x_of())
        assert len(caplog.records) == 2
        assert "the output of 'layers.0'" in caplog.text


# -- in training ----------------------------------------------------------------------------------


def fit(probe: hookline.Hook, tmp_path: Any, bad_step: int | None, n: int = 6) -> tuple[Any, Any]:
    model, optimizer = make()

    class Break(hookline.Hook):
        def on_before_forward(self, step: int) -> None:
            if step == bad_step:
                with torch.no_grad():
                    model.first.bias[0] = math.inf

    config = hookline.TrainerConfig(runs=tmp_path, progress="off", max_epochs=1, on_nan="continue")
    hooks = [Break(), probe]
    trainer = hookline.Trainer(config, model, optimizer, loss_fn=F.mse_loss, hooks=hooks)
    trainer.fit(batches(n))
    return model, trainer


def test_in_a_trainer_the_step_is_named_and_training_stopped(tmp_path: Any) -> None:
    probe = Debug(action="stop")
    _, trainer = fit(probe, tmp_path, bad_step=3)
    assert probe.findings[0].module == "first"
    assert (probe.findings[0].step, probe.findings[0].epoch) == (3, 0)
    assert (trainer.status, trainer.step) == ("stopped", 4)
    assert trainer.run is not None
    manifest = json.loads((trainer.run.path / "manifest.json").read_text())
    assert "debug_probe" in [hook["name"] for hook in manifest["hooks"]]


def test_training_is_the_same_with_a_debug_probe(tmp_path: Any) -> None:
    conditions = ["nonfinite", {"magnitude": 1e6}, "dead", lambda x: x.mean() > 1e6]
    probe = Debug(conditions=conditions, gradients=True)
    watched, trainer = fit(probe, tmp_path / "a", bad_step=None)
    plain, optimizer = make()
    train(plain, optimizer, batches(6))
    assert same(weights(watched), weights(plain))
    assert (probe.findings, trainer.step) == ([], 6)


def test_in_training_nothing_is_read_before_the_step_ends() -> None:
    class Context:
        step, epoch = 7, 1

    class Trainer:
        stopped = ""

        def stop(self, reason: str) -> None:
            self.stopped = reason

    model, probe, trainer = bad_model(), Debug(action="stop"), Trainer()
    probe.attach(model, context=Context())
    model(x_of())
    model(x_of())
    assert probe.findings == []
    probe.on_step_end(trainer)
    (finding,) = probe.findings
    assert (finding.step, finding.epoch) == (7, 1)
    assert trainer.stopped.startswith("debug_probe: nonfinite: the output of 'layers.1'")
    probe.detach()


# -- gradient flow --------------------------------------------------------------------------------


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(x_of()).square().sum().backward()


def test_the_flow_of_gradients_is_that_of_the_parameters() -> None:
    model = Model()
    backward(model)
    flow = gradient_flow(model)
    assert [row.layer for row in flow.rows] == [f"layers.{i}.linear" for i in (3, 2, 1, 0)]
    for i, row in zip((3, 2, 1, 0), flow.rows, strict=True):
        linear = model.layers[i].linear
        gradient = torch.cat([linear.weight.grad.flatten(), linear.bias.grad])
        assert row.norm == pytest.approx(float(gradient.norm()))
        assert row.zeros == 0
        assert row.mean_abs == pytest.approx(float(gradient.abs().mean()))
        assert row.problem == ""
    assert flow.rows[0].ratio is None
    assert flow.rows[1].ratio == pytest.approx(flow.rows[1].norm / flow.rows[0].norm)  # type: ignore[operator]
    assert flow.first_bad is None
    assert flow.data[0]["layer"] == "layers.3.linear"


@pytest.mark.parametrize(
    ("factor", "problem"),
    [
        (1e-12, "vanishes"),
        (1e-25, "vanishes"),
        (0.0, "zero"),
        (1e9, "explodes"),
        (math.nan, "not finite"),
    ],
)
def test_the_first_layer_whose_gradient_went_bad_is_named(factor: float, problem: str) -> None:
    class Scaled(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.detach() + (y - y.detach()) * factor

    model = Model()
    model.layers[1] = Scaled()
    backward(model)
    flow = gradient_flow(model)
    if math.isnan(factor):  # it went forward, too
        assert flow.first_bad == "layers.3.linear"
        return
    assert flow.first_bad == "layers.1.linear"
    assert [row.problem for row in flow.rows] == ["", "", problem, problem]
    lines = str(flow).splitlines()
    assert lines[0].split() == ["layer", "norm", "mean", "abs", "zeros", "ratio"]
    assert lines[3].startswith("layers.1.linear")
    assert lines[3].endswith(problem)
    assert lines[-1] == f"The first layer with a problem: 'layers.1.linear' ({problem})."


# -- compiled models ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_in_a_compiled_model_outputs_are_checked_and_gradients_said_not_to_be(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    inner, probe = bad_model(), Debug("layers.*", gradients=True)
    probe.attach(inner)
    torch.compiler.reset()
    model: Callable[..., Any] = torch.compile(inner, fullgraph=True, backend=backend)
    model(x_of())
    model(x_of())
    probe.detach()
    assert [finding.module for finding in probe.findings] == ["layers.1", "layers.1"]
    said = [r for r in caplog.records if "cannot see gradients" in r.getMessage()]
    assert len(said) == 1


def test_what_is_found_in_training_is_an_event_of_the_run(tmp_path: Any) -> None:
    _, optimizer = made = make()
    model = made[0]
    model.first.register_forward_hook(lambda module, args, output: output / 0)
    probe = Debug("**", gradients=True)
    with hookline.attach(model, optimizer, hooks=[probe], runs=tmp_path) as session:
        for x, y in batches(3):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    text = (session.run.path / "events.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    found = [event for event in events if event["kind"] == "debug_finding"]
    assert [(event["where"], event["module"]) for event in found] == [
        ("output", "first"),
        ("gradient", "second"),
    ]
    for event, finding in zip(found, probe.findings, strict=False):
        assert (event["step"], event["call"], event["probe"]) == (1, 0, "debug_probe")
        assert (event["condition"], event["message"]) == ("nonfinite", str(finding))
