"""Probes in functional transforms, which they do not see, and on nested tensors, which they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import batches, same, weights
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

import hookline
from hookline.probes import Capture, Debug, Edit, Monitor
from hookline.probes.call import Call
from hookline.probes.probe import Probe


class Model(nn.Module):
    """Without dropout, whose random numbers `vmap` refuses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Own(Probe):
    """Reads every output, as a user's probe may."""

    def __init__(self) -> None:
        super().__init__("**")
        self.means: list[float] = []

    def after(self, call: Call) -> None:
        self.means.append(call.output.mean().item())


OBSERVERS: dict[str, Callable[[], Probe]] = {
    "monitor": lambda: Monitor("**"),
    "times": lambda: Monitor("**", ["forward_time_ms", "memory"]),
    "debug": lambda: Debug("**", gradients=True),
    "capture": lambda: Capture("**", gradient=True),
    "own": Own,
}


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "functional transforms" in r.getMessage()]


def train_per_sample(*hooks: Any) -> tuple[nn.Module, Any]:
    """Train with per-sample gradients in every other step."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    with hookline.attach(model, optimizer, hooks=hooks) as session:
        for i, (x, y) in enumerate(batches(6)):
            if i % 2:
                F.mse_loss(model(x), y).backward()
            else:
                parameters = {name: p.detach() for name, p in model.named_parameters()}
                gradients = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
                for name, parameter in model.named_parameters():
                    parameter.grad = gradients[name].mean(0)
            optimizer.step()
            optimizer.zero_grad()
    return model, session


@pytest.mark.parametrize("kind", OBSERVERS)
def test_a_loop_with_per_sample_gradients_is_observed_between_them(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    probe = OBSERVERS[kind]()
    model, session = train_per_sample(probe)
    (info,) = session.hooks.describe()
    assert (info.status, info.failures) == ("enabled", 0)
    assert same(weights(model), weights(train_per_sample()[0]))
    assert len(messages(caplog)) == 1
    if isinstance(probe, Capture):
        assert probe.counts.captured == 3 * len(list(model.modules()))
    if isinstance(probe, Own):
        assert len(probe.means) == 3 * len(list(model.modules()))


@pytest.mark.parametrize("kind", OBSERVERS)
def test_transforms_outside_of_training_are_not_disturbed(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Model(), batches(1)[0][0]
    plain = vmap(model)(x), jvp(model, (x,), (x,))
    with OBSERVERS[kind]().attach(model):
        outputs = vmap(model)(x), jvp(model, (x,), (x,))
    for one, other in zip((plain[0], *plain[1]), (outputs[0], *outputs[1]), strict=True):
        assert torch.equal(one, other)
    assert len(messages(caplog)) == 1
    assert not [record for record in caplog.records if "saw no" in record.getMessage()]


def test_an_edit_acts_within_a_transform_and_can_be_toggled_there() -> None:
    model, x = Model(), batches(1)[0][0]
    edit = Edit.scale("first", 0.0, enable_intervention=True)

    def toggled(row: torch.Tensor) -> torch.Tensor:
        assert edit.attachment is not None
        edit.attachment.disable()
        edit.attachment.enable()
        return model(row)

    with edit.attach(model):
        expected = model(x)
        torch.testing.assert_close(vmap(model)(x), expected)
        torch.testing.assert_close(vmap(toggled)(x), expected)
        assert not grad(lambda row: toggled(row).sum())(x[0]).any()


# -- nested tensors -------------------------------------------------------------------------------


def make_encoder() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return an encoder that computes with nested tensors in eval mode, an input and its mask."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = mask[1, 1:] = True
    return nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8), mask


MEASURES: dict[str, Callable[[], Probe]] = {
    "monitor": lambda: Monitor("**"),
    "all": lambda: Monitor("**", ["histogram", "dead", "forward_time_ms", "memory"]),
    "debug": lambda: Debug("**", ["nonfinite", {"magnitude": 1e6}, "dead"]),
    "condition": lambda: Debug("**", lambda x: x.sum() > 1e9),
    "capture": lambda: Capture("**"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", MEASURES)
def test_inference_on_nested_tensors_is_not_disturbed(kind: str) -> None:
    model, x, mask = make_encoder()
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        with MEASURES[kind]().attach(model) as probe:
            assert torch.equal(model(x, src_key_padding_mask=mask), expected)
    if isinstance(probe, Debug):
        assert probe.findings == []
    if isinstance(probe, Capture):
        assert "layers.1.norm2" in probe
        assert repr(probe.states())
