"""Loops with a GradScaler: what hooks see is unscaled, and skipped steps are told."""

from __future__ import annotations

import pytest
import torch
from loops import batches, make, recorder, same, weights
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import LoopError


def scaled_loop(model, optimizer, scaler, data, *, clip=False):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def with_an_overflow(n=4, at=1):
    data = batches(n)
    data[at] = (data[at][0], torch.full_like(data[at][1], float("inf")))
    return data


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=0.01, **options)


OPTIMIZERS = [
    pytest.param({"fused": False, "foreach": False}, id="plain"),
    pytest.param({"foreach": True}, id="foreach"),
    pytest.param({"fused": True}, id="fused"),
]


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
def test_attaching_to_a_scaled_loop_changes_no_bit(options, clip):
    plain, _ = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaled_loop(plain, adam(plain, **options), scaler, with_an_overflow(8), clip=clip)
    model, _ = make()
    optimizer = adam(model, **options)
    other = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    hooks = [recorder("on_gradients_ready", on_step_end=("loss", "grad_norm"))]
    with hookline.attach(model, optimizer, hooks=hooks, scaler=other):
        scaled_loop(model, optimizer, other, with_an_overflow(8), clip=clip)
    assert same(weights(model), weights(plain))
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_skipped_steps_are_told_and_not_counted(options):
    hook = recorder(
        "on_after_optimizer_step",
        on_step_skipped=("reason", "optimizer_idx"),
        on_step_end=("ctx",),
    )
    model, _ = make()
    optimizer = adam(model, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookline.attach(model, optimizer, hooks=[hook], scaler=scaler) as session:
        scaled_loop(model, optimizer, scaler, with_an_overflow(3, at=1))
    names = [told if isinstance(told, str) else told[0] for told in hook.told]
    step = ["on_after_optimizer_step", "on_step_end"]
    assert names == [*step, "on_step_skipped", "on_step_end", *step]
    assert "non-finite" in hook.told[2][1]["reason"]
    contexts = [t[1]["ctx"] for t in hook.told if t[0] == "on_step_end"]
    assert [ctx.skipped for ctx in contexts] == [False, True, False]
    assert [ctx.step for ctx in contexts] == [1, 1, 2]
    assert session.step == 2


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_gradients_and_loss_are_unscaled_for_hooks(options):
    seen = {}

    class Norms(hookline.Hook):
        def on_gradients_ready(self, model):
            seen["ready"] = model.first.weight.grad.clone()

        def on_before_optimizer_step(self, model):
            seen["before"] = model.first.weight.grad.clone()

        def on_step_end(self, model, loss):
            seen["end"] = model.first.weight.grad.clone()
            seen["loss"] = float(loss)

    x, y = batches(1)[0]
    plain, _ = make()
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    model, _ = make()
    optimizer = adam(model, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookline.attach(model, optimizer, hooks=[Norms()], scaler=scaler):
        scaled_loop(model, optimizer, scaler, [(x, y)])
    assert seen["loss"] == loss.item()
    for name in ("ready", "before", "end"):
        torch.testing.assert_close(seen[name], plain.first.weight.grad)


def test_the_session_scales_and_unscales_by_itself_too():
    hook = recorder(
        on_before_backward=("loss",), on_gradient_clip=("grad_norm",), on_step_end=("loss",)
    )
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = batches(1)[0]
    with hookline.attach(model, optimizer, hooks=[hook], scaler=scaler) as session:
        loss = F.mse_loss(model(x), y)
        session.backward(loss)
        assert model.first.weight.grad.abs().max() > 1
        session.updates()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert [name for name, _ in hook.told] == [
        "on_before_backward",
        "on_gradient_clip",
        "on_step_end",
    ]
    assert float(hook.told[2][1]["loss"]) == loss.item()
    assert 0.1 < float(hook.told[1][1]["grad_norm"]) < 10


@pytest.mark.parametrize("by", ["updates", "unscale_"])
def test_saying_twice_that_gradients_are_ready_unscales_once(by):
    hook = recorder("on_gradients_ready")
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = batches(1)[0]
    with hookline.attach(model, optimizer, hooks=[hook], scaler=scaler) as session:
        session.backward(F.mse_loss(model(x), y))
        if by == "updates":
            session.updates()
        else:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert hook.told == ["on_gradients_ready"]


def test_going_around_the_scaler_is_refused():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    x, y = batches(1)[0]
    with (
        pytest.raises(LoopError, match=r"scaler\.step"),
        hookline.attach(model, optimizer, hooks=[recorder("on_step_end")], scaler=scaler),
    ):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        optimizer.step()
