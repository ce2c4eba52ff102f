"""Autocast without effect, dead layers and constant outputs are found; quiet layers are not."""

from __future__ import annotations

import pytest
import torch
from lint_loops import lint_steps
from loops import fit
from torch import nn
from torch.nn import functional as F

import hookline


def data(step, count=8):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.arange(count) % 3


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


# -- autocast-not-applied --------------------------------------------------------------------------


class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = classifier(), nn.Linear(3, 3)
        self.whole = True

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.inner(x)
            if self.whole:
                return self.head(x)
        return self.head(x)


@pytest.mark.parametrize("case", ["loss", "loss by hand", "disabled"])
def test_layers_that_autocast_does_not_reach_are_found_in_the_first_step(case):
    model = Disabled() if case == "disabled" else classifier()

    def loss_of(step):
        x, y = data(step)
        outputs = None if case == "disabled" else model(x)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x) if outputs is None else outputs
            if case == "loss by hand":
                loss = outputs.square().mean()
                loss.backward()
                return loss.detach().requires_grad_()
            return F.cross_entropy(outputs, y)

    found = lint_steps(model, loss_of, 1)
    assert set(found) == {"autocast-not-applied"}
    expected = "inner.0, inner.2, head" if case == "disabled" else "0, 2"
    assert found["autocast-not-applied"].subject == expected


@pytest.mark.parametrize("case", ["on", "off", "partly", "bfloat16", "loss outside", "float64"])
def test_autocast_that_applies_or_was_not_asked_for_is_not_found(case):
    model = Disabled() if case == "partly" else classifier()
    if case == "partly":
        model.whole = False
    if case in ("bfloat16", "float64"):
        model.to(getattr(torch, case))

    def loss_of(step):
        x, y = data(step)
        x = x.to(next(model.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=case != "off"):
            outputs = model(x)
            if case != "loss outside":
                return F.cross_entropy(outputs, y)
        return F.cross_entropy(outputs.float(), y)

    assert not lint_steps(model, loss_of)


# -- dead-layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("bias", [-100.0, 0.0])
def test_a_layer_that_a_relu_cuts_off_is_found_in_the_third_step(functional, bias):
    torch.manual_seed(0)
    model = classifier()
    nn.init.constant_(model[0].bias, bias)
    if not bias:
        nn.init.zeros_(model[0].weight)

    def loss_of(step):
        x, y = data(step)
        hidden = model[0](x).relu() if functional else model[1](model[0](x))
        return F.cross_entropy(model[2](hidden), y)

    found = lint_steps(model, loss_of, only=["dead-layer"])
    assert found["dead-layer"].subject == "0"
    assert found["dead-layer"].step == 3


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.a, self.b = classifier(), nn.Linear(8, 4), nn.Linear(4, 3)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize(
    "case", ["usual", "lora", "zero head", "frozen", "no loss", "lr 0", "some"]
)
def test_quiet_layers_are_not_found(case):
    model = Lora() if case == "lora" else classifier()
    if case in ("zero head", "lr 0"):
        model[2] = nn.Linear(16, 6)
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
    if case == "frozen":
        nn.init.constant_(model[0].bias, -100.0)
        model[0].requires_grad_(requires_grad=False)
    if case == "some":
        model[0].bias.data[:15] = -100.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if case == "lr 0" else 0.1)

    def loss_of(step):
        x, y = data(step)
        return F.cross_entropy(model(x), y) * (0.0 if case == "no loss" else 1.0)

    assert not lint_steps(model, loss_of, 8, optimizer=optimizer, only=["dead-layer"])


# -- one-live-expert -------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Experts that get their tokens, or all tokens with a mask."""

    def __init__(self, *, kind="modules", collapsed=True):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, 4)
        if collapsed:
            nn.init.zeros_(self.gate.weight)
            self.gate.bias.data = torch.tensor([0.0, 9.0, 0.0, 0.0])
        self.kind = kind
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).max(-1)
        if self.kind == "masks":
            outputs = sum(e(x) * (index == i)[:, None] for i, e in enumerate(self.experts))
        else:
            outputs = x.new_zeros(len(x), 3)
            for i, expert in enumerate(self.experts):
                outputs[index == i] = expert(x[index == i])
        return outputs * weight[:, None]


@pytest.mark.parametrize("kind", ["modules", "masks"])
@pytest.mark.parametrize("collapsed", [True, False])
def test_a_router_that_uses_one_expert_is_found(kind, collapsed):
    model = Mixture(kind=kind, collapsed=collapsed)

    def loss_of(step):
        x, y = data(step, 32)
        return F.cross_entropy(model(x), y)

    found = lint_steps(model, loss_of, 9)
    assert set(found) == ({"one-live-expert"} if collapsed else set())
    if collapsed:
        assert found["one-live-expert"].subject == "experts"
        assert "Only expert 1 of 4" in found["one-live-expert"].message


def test_few_tokens_or_experts_without_a_router_are_not_found():
    model = Mixture()

    def loss_of(step):
        x, y = data(step, 4)
        return F.cross_entropy(model(x), y)

    assert not lint_steps(model, loss_of, 9)
    heads = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(8, 3) for _ in range(4))})
    assert not lint_steps(heads, lambda step: heads["experts"][0](data(step)[0]).sum(), 9)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_trainers_precision_is_no_finding(precision):
    lint = hookline.Lint()
    fit(lint, precision=precision)
    assert not lint.findings
