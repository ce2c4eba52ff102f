"""A loop that clips with torch's functions is followed as it stands."""

from __future__ import annotations

import pytest
import torch
from loops import batches, make, recorder, same, train, weights
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import hookline
from hookline import LoopError


class Halve(hookline.UpdateHook):
    def __call__(self, gradients):
        return {name: 0.5 * gradient for name, gradient in gradients.items()}


class Norms(hookline.Hook):
    """Keeps the norm of the gradients at each event, as it is there."""

    def __init__(self):
        self.seen = []
        self.grad_norms = []

    def norm(self, model):
        return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()

    def on_gradients_ready(self, model):
        self.seen.append(("ready", self.norm(model).item()))

    def on_gradient_clip(self, model, grad_norm):
        self.seen.append(("clip", self.norm(model).item()))
        self.grad_norms.append(float(grad_norm))

    def on_before_optimizer_step(self, model):
        self.seen.append(("before step", self.norm(model).item()))

    def on_step_end(self, grad_norm):
        self.grad_norms.append(float(grad_norm))


def clip_in_two_calls(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    clip_grads_with_norm_(model.parameters(), 0.1, get_total_norm(gradients))


CLIPS = {
    "norm": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "through the module": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "a part": lambda model: clip_grad_norm_(model.second.parameters(), 0.1),
    "part by part": lambda model: [clip_grad_norm_([p], 0.1) for p in model.parameters()],
    "another norm": lambda model: clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0),
    "infinity": lambda model: clip_grad_norm_(model.parameters(), 0.01, float("inf")),
    "by value": lambda model: clip_grad_value_(model.parameters(), 0.001),
    "value, then norm": lambda model: [
        clip_grad_value_(model.parameters(), 0.01),
        clip_grad_norm_(model.parameters(), 0.01),
    ],
    "in two calls": clip_in_two_calls,
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("updates", [[], [Halve()]], ids=["", "updates"])
def test_hooks_see_gradients_before_clipping_and_grad_norm_is_of_those(clip, updates):
    hook = Norms()
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook, *updates]):
        train(model, optimizer, batches(3), lambda: clip(model))
    assert [event for event, _ in hook.seen] == ["ready", "clip", "before step"] * 3
    for i in range(3):
        ready, clipped, used = (norm for _, norm in hook.seen[3 * i : 3 * i + 3])
        expected = ready / 2 if updates else ready
        assert hook.grad_norms[2 * i] == pytest.approx(expected, rel=1e-5)
        assert hook.grad_norms[2 * i + 1] == pytest.approx(expected, rel=1e-5)
        assert clipped < expected
        assert used <= clipped


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_watching_clips_changes_no_bit(clip):
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, batches(4), lambda: clip(plain))
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Norms()]):
        train(model, optimizer, batches(4), lambda: clip(model))
    assert same(weights(model), weights(plain))


def test_a_norm_that_is_only_read_changes_nothing():
    hook = recorder("on_gradients_ready", "on_before_optimizer_step", on_step_end=("grad_norm",))
    model, optimizer = make()

    def read():
        hook.told.append(get_total_norm([p.grad for p in model.parameters()]).item())

    with hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, batches(1), read)
    norm, *events = hook.told
    assert events[:2] == ["on_gradients_ready", "on_before_optimizer_step"]
    assert float(events[2][1]["grad_norm"]) == pytest.approx(norm)


def test_a_norm_that_the_loop_reads_is_that_of_updated_gradients():
    norms = []
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Halve()]):
        for x, y in batches(2):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            before = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            read = get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            used = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            get_total_norm([p.grad for p in model.parameters()])  # after the step: only read
            again = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            norms.append([n.item() for n in (before, read, used, again)])
    for before, read, used, again in norms:
        assert read == pytest.approx(before / 2)
        assert used == pytest.approx(before / 2)
        assert again == used


@pytest.mark.parametrize("hook", [Norms(), Halve(), recorder(on_gradient_clip=("grad_norm",))])
def test_a_backward_after_a_clip_is_an_error(hook):
    model, optimizer = make()
    before = weights(model)
    with (
        pytest.raises(LoopError, match="Clip once, after the last backward"),
        hookline.attach(model, optimizer, hooks=[hook]),
    ):
        for x, y in batches(2):
            F.mse_loss(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert same(weights(model), before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_the_loop_leaves_out_after_a_clip_is_forgotten(set_to_none):
    hook = Norms()
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook, Halve()]):
        for i, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad(set_to_none=set_to_none)
            F.mse_loss(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            if i != 1:
                optimizer.step()
    first, left_out, third = (hook.seen[0:3], hook.seen[3:5], hook.seen[5:8])
    assert [event for event, _ in left_out] == ["ready", "clip"]
    for step in (first, third):
        assert [event for event, _ in step] == ["ready", "clip", "before step"]
    assert hook.grad_norms[-1] == pytest.approx(third[0][1] / 2, rel=1e-5)


def test_clipping_scaled_gradients_is_an_error():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = batches(1)[0]
    with (
        pytest.raises(LoopError, match=r"scaler\.unscale_\(optimizer\)"),
        hookline.attach(model, optimizer, hooks=[Norms()], scaler=scaler),
    ):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("together", [True, False])
def test_each_optimizer_has_its_own_norm_and_the_step_that_of_all(together):
    hook = recorder(on_gradient_clip=("grad_norm", "optimizer_idx"), on_step_end=("grad_norm",))
    model, _ = make()
    parts = [model.first, model.second]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    x, y = batches(1)[0]
    with hookline.attach(model, optimizers, hooks=[hook]):
        F.mse_loss(model(x), y).backward()
        norms = [get_total_norm([p.grad for p in part.parameters()]).item() for part in parts]
        if together:
            clip_grad_norm_(model.parameters(), 0.1)
        for part, optimizer in zip(parts, optimizers, strict=True):
            if not together:
                clip_grad_norm_(part.parameters(), 0.1)
            optimizer.step()
    first, second, end = (arguments for _, arguments in hook.told)
    assert [first["optimizer_idx"], second["optimizer_idx"]] == [0, 1]
    assert float(first["grad_norm"]) == pytest.approx(norms[0])
    assert float(second["grad_norm"]) == pytest.approx(norms[1])
    assert float(end["grad_norm"]) == pytest.approx((norms[0] ** 2 + norms[1] ** 2) ** 0.5)


def test_one_of_two_optimizers_that_is_clipped_is_enough_for_the_event():
    hook = recorder(on_gradient_clip=("optimizer_idx",))
    model, _ = make()
    a = torch.optim.SGD(model.first.parameters(), lr=0.1)
    b = torch.optim.SGD(model.second.parameters(), lr=0.1)
    x, y = batches(1)[0]
    with hookline.attach(model, [a, b], hooks=[hook]):
        F.mse_loss(model(x), y).backward()
        a.step()
        clip_grad_norm_(model.second.parameters(), 0.1)
        b.step()
    assert hook.told == [("on_gradient_clip", {"optimizer_idx": 1})]


def test_other_models_and_hooks_without_gradients_are_not_concerned():
    hook = Norms()
    model, optimizer = make()
    other, other_optimizer = make()
    with (
        hookline.attach(model, optimizer, hooks=[hook]),
        hookline.attach(other, other_optimizer, hooks=[recorder("on_after_backward")]),
    ):
        train(other, other_optimizer, batches(1), lambda: CLIPS["norm"](other))
        assert hook.seen == []
        train(model, optimizer, batches(1), lambda: CLIPS["norm"](model))
    assert len(hook.seen) == 3


def test_a_closure_that_clips_is_seen_once_in_a_step():
    hook = recorder("on_gradient_clip", "on_step_end")
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)
    x, y = batches(1)[0]

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        return loss

    with hookline.attach(model, optimizer, hooks=[hook]):
        optimizer.step(closure)
        optimizer.step(closure)
    assert hook.told == ["on_gradient_clip", "on_step_end"] * 2
