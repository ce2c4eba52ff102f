"""Optimizers as loops have them: at different rates, of other classes, made later, or none."""

from __future__ import annotations

import copy
import gc
import logging
from functools import partial

import pytest
import torch
from loops import Net, batches, make, recorder, same, snapshot, told_in, train, weights
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

import hookline
from hookline import LoopError, NotSuppliedError

STEP = ("on_before_optimizer_step", "on_after_optimizer_step", "on_step_end")


# -- at different rates ---------------------------------------------------------------------------


def two_optimizers(model: Net) -> list[torch.optim.Optimizer]:
    """As nanochat's: one for matrices, one for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


def uneven_loop(model, optimizers, data, *, clip=False, every=2):
    """The second optimizer steps in every second batch, with the gradients of two."""
    losses = []
    first, second = optimizers
    for i, (x, y) in enumerate(data):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        first.step()
        first.zero_grad()
        if i % every == every - 1:
            second.step()
            second.zero_grad()
    return losses


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("says", [False, True], ids=["found", "step_of"])
def test_the_optimizer_that_steps_more_often_ends_steps(says, clip, caplog):
    caplog.set_level(logging.INFO)
    plain, _ = make()
    losses = uneven_loop(plain, two_optimizers(plain), batches(6), clip=clip)
    model, _ = make()
    optimizers = two_optimizers(model)
    hook = recorder(
        on_gradients_ready=("optimizer_idx",),
        on_before_optimizer_step=("optimizer_idx",),
        on_after_optimizer_step=("optimizer_idx",),
        on_step_end=("step", "loss", "grad_norm"),
    )
    options = {"step_of": optimizers[0]} if says else {}
    with hookline.attach(model, optimizers, hooks=[hook], **options) as session:
        assert uneven_loop(model, optimizers, batches(6), clip=clip) == losses
    assert same(weights(model), weights(plain))
    assert session.step == 6
    ends = told_in(hook, "on_step_end")
    assert [end["step"] for end in ends] == [1, 2, 3, 4, 5, 6]
    assert [float(end["loss"]) for end in ends] == losses
    for event in ("on_before_optimizer_step", "on_after_optimizer_step"):
        turns = [told["optimizer_idx"] for told in told_in(hook, event)]
        assert turns == [0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert caplog.text.count("its step ends a step") == (not says)


def test_the_norm_of_a_step_is_that_of_the_optimizers_that_step_in_it():
    model, _ = make()
    optimizers = two_optimizers(model)
    hook, norms = recorder(on_step_end=("grad_norm",)), []
    matrices = [p for p in model.parameters() if p.ndim == 2]
    first_step = optimizers[0].step
    optimizers[0].step = lambda: (  # before the first optimizer steps
        norms.append(nn.utils.get_total_norm([p.grad for p in matrices]).item()),
        first_step(),
    )
    with hookline.attach(model, optimizers, hooks=[hook], step_of=optimizers[0]):
        uneven_loop(model, optimizers, batches(4), every=10)
    assert [told["grad_norm"] for told in told_in(hook, "on_step_end")] == norms


def test_gradients_of_a_later_backward_are_not_in_the_norm_of_an_earlier_turn():
    """As in a GAN: the second backward adds gradients to the first optimizer's parameters."""
    model, _ = make()
    optimizers = two_optimizers(model)
    x, y = batches(1)[0]
    hook = recorder(on_step_end=("grad_norm",))
    with hookline.attach(model, optimizers, hooks=[hook]):
        F.mse_loss(model(x), y).backward()
        first = [p.grad.clone() for g in optimizers[0].param_groups for p in g["params"]]
        optimizers[0].step()
        optimizers[1].zero_grad()
        F.mse_loss(model(x), y).backward()
        second = [p.grad.clone() for g in optimizers[1].param_groups for p in g["params"]]
        optimizers[1].step()
    expected = nn.utils.get_total_norm([*first, *second]).item()
    assert told_in(hook, "on_step_end")[0]["grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_the_rule_is_saved_and_loaded(tmp_path):
    model, _ = make()
    optimizers = two_optimizers(model)
    with hookline.attach(model, optimizers, hooks=[recorder("on_step_end")]) as session:
        uneven_loop(model, optimizers, batches(4))
        session.save_checkpoint(tmp_path / "saved", wait=True)
    other, _ = make()
    others = two_optimizers(other)
    hook = recorder(on_step_end=("step",))
    resumed = hookline.attach(other, others, hooks=[hook])
    assert resumed.load_checkpoint(tmp_path / "saved").step == 4
    with resumed:
        x, y = batches(1)[0]
        F.mse_loss(other(x), y).backward()
        others[0].step()
        assert told_in(hook, "on_step_end") == [{"step": 5}]  # at once, not in the next step


def test_a_checkpoint_of_an_uneven_loop_is_saved_when_all_have_stepped(tmp_path):
    """Not between the optimizer that ends the step and the other one, which steps after it."""

    class Saves(hookline.Hook):
        def on_step_end(self, trainer, step):
            if step == 2:
                trainer.save_checkpoint(tmp_path / "saved")

    def state(model, optimizers):
        return [weights(model), *(copy.deepcopy(o.state_dict()["state"]) for o in optimizers)]

    model, _ = make()
    optimizers = two_optimizers(model)
    with hookline.attach(model, optimizers, hooks=[Saves()], step_of=optimizers[0]):
        uneven_loop(model, optimizers, batches(2))
        expected = state(model, optimizers)
        uneven_loop(model, optimizers, batches(2))
    other, _ = make(seed=5)
    others = two_optimizers(other)
    session = hookline.attach(other, others, hooks=[])
    session.load_checkpoint(tmp_path / "saved")
    session.detach()
    torch.testing.assert_close(state(other, others), expected, rtol=0, atol=0)


@pytest.mark.parametrize("says", [False, True], ids=["found", "step_of"])
def test_gradients_that_wait_for_the_slower_optimizer_are_saved_and_restored(says, tmp_path):
    def attach():
        model, _ = make()
        model.drop.p = 0.0
        optimizers = two_optimizers(model)
        options = {"step_of": optimizers[0]} if says else {}
        return model, optimizers, hookline.attach(model, optimizers, **options)

    data = batches(9)
    model, optimizers, session = attach()
    with session:
        uneven_loop(model, optimizers, data[:3], every=3)
        uneven_loop(model, optimizers, data[3:5], every=3)  # the second one has not stepped again
        waiting = [p.grad.clone() for p in optimizers[1].param_groups[0]["params"]]
        session.save_checkpoint(tmp_path / "saved", wait=True)
        uneven_loop(model, optimizers, data[5:6], every=1)
        uneven_loop(model, optimizers, data[6:], every=3)
    resumed, its_optimizers, session = attach()
    assert session.load_checkpoint(tmp_path / "saved").step == 5
    assert same([p.grad for p in its_optimizers[1].param_groups[0]["params"]], waiting)
    assert all(p.grad is None for p in its_optimizers[0].param_groups[0]["params"])
    with session:
        uneven_loop(resumed, its_optimizers, data[5:6], every=1)
        uneven_loop(resumed, its_optimizers, data[6:], every=3)
    assert same(weights(resumed), weights(model))


def test_gradients_of_other_parameters_are_refused(tmp_path):
    model, _ = make()
    optimizers = two_optimizers(model)
    with hookline.attach(model, optimizers, step_of=optimizers[0]) as session:
        uneven_loop(model, optimizers, batches(1))
        session.save_checkpoint(tmp_path / "saved", wait=True)
    other, _ = make()
    matrices = [p for p in other.parameters() if p.ndim == 2]
    others = [p for p in other.parameters() if p.ndim != 2]
    swapped = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others[::-1])]
    session = hookline.attach(other, swapped)
    with pytest.raises(hookline.CheckpointError, match="gradients of the step in progress"):
        session.load_checkpoint(tmp_path / "saved")
    assert all(parameter.grad is None for parameter in other.parameters())


def test_step_of_has_to_be_attached():
    model, optimizer = make()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="one of the optimizers that are attached"):
        hookline.attach(model, optimizer, step_of=other)


# -- objects that behave like optimizers ----------------------------------------------------------


class Sgd:
    """An optimizer of no library."""

    def __init__(self, parameters, lr=0.1):
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter -= self.param_groups[0]["lr"] * parameter.grad
        return loss

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def test_an_object_that_behaves_like_an_optimizer_is_one():
    plain, _ = make()
    losses = train(plain, Sgd(plain.parameters()), batches(4))
    model, _ = make()
    optimizer = Sgd(model.parameters())
    before = snapshot(optimizer)
    hook = recorder(*STEP[:2], on_step_end=("step", "loss", "lr", "optimizer"))
    with hookline.attach(model, optimizer, hooks=[hook]):
        assert train(model, optimizer, batches(4)) == losses
        assert copy.deepcopy(optimizer).step.__func__ is Sgd.step
    assert same(weights(model), weights(plain))
    assert hook.told[:2] == list(STEP[:2])
    ends = told_in(hook, "on_step_end")
    assert [(end["step"], float(end["loss"]), end["lr"]) for end in ends] == [
        (i + 1, loss, 0.1) for i, loss in enumerate(losses)
    ]
    assert ends[0]["optimizer"] is optimizer
    assert snapshot(optimizer) == before
    assert "step" not in vars(optimizer)


def test_its_closure_is_watched_and_its_steps_can_be_skipped():
    model, _ = make()
    optimizer = Sgd(model.parameters())
    hook = recorder("on_step_skipped", on_step_end=("loss",))
    x, y = batches(1)[0]
    model.eval()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        loss = optimizer.step(closure)
        assert told_in(hook, "on_step_end")[0]["loss"] == loss.item()
        before = weights(model)
        session.skip_optimizer_step()
        train(model, optimizer, [(x, y)])
    assert same(weights(model), before)
    assert hook.told[1] == "on_step_skipped"


def test_a_step_that_cannot_be_replaced_is_refused_with_what_to_use_instead():
    class Slots:
        __slots__ = ("param_groups",)
        step, zero_grad = Sgd.step, Sgd.zero_grad

    model, _ = make()
    optimizer = Slots()
    optimizer.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]
    before = snapshot(model)
    with pytest.raises(TypeError, match=r"(?s)Slots.*cannot be replaced.*HookRunner"):
        hookline.attach(model, optimizer, hooks=[recorder("on_step_end")])
    assert snapshot(model) == before


def test_one_without_a_rate_has_no_rate():
    model, _ = make()
    optimizer = Sgd(model.parameters())
    optimizer.step = lambda: None
    del optimizer.param_groups[0]["lr"]
    hook = recorder(on_step_end=("lr",))
    settings = hookline.HookSettings(isolate=False)
    with (
        pytest.raises(hookline.HooklineError, match="no 'lr' in its param_groups"),
        hookline.attach(model, optimizer, hooks=[hook], settings=settings),
    ):
        train(model, optimizer, batches(1))


def test_one_without_a_state_cannot_be_saved(tmp_path):
    model, _ = make()
    optimizer = Sgd(model.parameters())
    with (
        pytest.raises(LoopError, match=r"The state of Sgd cannot be saved"),
        hookline.attach(model, optimizer, hooks=[hookline.CheckpointHook()], runs=tmp_path),
    ):
        pytest.fail("training must not start")


# -- optimizers that come later -------------------------------------------------------------------


class Shop:
    """As minGPT's trainer: it makes its optimizer inside `run`."""

    def __init__(self, model, data, *, several=False, clip=True):
        self.model, self.data, self.several, self.clip = model, data, several, clip

    def run(self):
        model, losses, self.norms = self.model, [], []
        single = [torch.optim.AdamW(model.parameters(), lr=0.01)]
        self.optimizers = two_optimizers(model) if self.several else single
        for x, y in self.data:
            loss = F.mse_loss(model(x), y)
            model.zero_grad(set_to_none=True)
            loss.backward()
            self.norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in self.optimizers:
                optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
def test_an_optimizer_that_is_made_later_is_found_when_it_steps(several, clip):
    plain, _ = make()
    losses = Shop(plain, batches(4), several=several, clip=clip).run()
    model, _ = make()
    shop = Shop(model, batches(4), several=several, clip=clip)
    names = ("on_train_start", "on_before_forward", "on_after_backward", "on_gradients_ready")
    hook = recorder(*names, on_step_end=("step", "loss", "grad_norm", "lr", "optimizer"))
    with hookline.attach(model, hooks=[hook]) as session:
        assert len(_global_optimizer_pre_hooks) == 1
        assert shop.run() == losses
        assert len(_global_optimizer_pre_hooks) == 0
        assert session.optimizers == shop.optimizers
    assert same(weights(model), weights(plain))
    assert hook.told[:4] == list(names)
    ends = told_in(hook, "on_step_end")
    assert [end["step"] for end in ends] == [1, 2, 3, 4]
    assert [float(end["loss"]) for end in ends] == losses
    assert ends[0]["optimizer"] is shop.optimizers[0]
    assert ends[0]["lr"] == (0.1 if several else 0.01)
    assert [end["grad_norm"] for end in ends] == pytest.approx(shop.norms, rel=1e-6)


def test_a_model_with_parameters_that_no_optimizer_has_ends_its_steps_too():
    model, _ = make()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    hook = recorder(on_step_end=("step", "loss"))
    with hookline.attach(model, hooks=[hook]) as session:
        losses = train(model, optimizer, batches(3))
    assert [float(told["loss"]) for told in told_in(hook, "on_step_end")] == losses
    assert session.step == 3


def test_another_models_optimizer_is_left_alone():
    model, optimizer = make()
    other, its_optimizer = make(seed=3)
    hook = recorder("on_step_end")
    with hookline.attach(model, hooks=[hook]) as session:
        train(other, its_optimizer, batches(2))
        assert hook.told == []
        train(model, optimizer, batches(2))
        train(other, its_optimizer, batches(2))
    assert session.optimizers == [optimizer]
    assert hook.told == ["on_step_end"] * 2


def test_updates_act_on_the_first_step_of_an_optimizer_that_was_not_given():
    class Halve(hookline.UpdateHook):
        def __call__(self, gradients):
            return {name: value / 2 for name, value in gradients.items()}

    found = []
    for given in (True, False):
        model, optimizer = make()
        optimizers = [optimizer] if given else []
        with hookline.attach(model, *optimizers, hooks=[Halve()]):
            train(model, optimizer, batches(2))
        found.append(weights(model))
    assert same(*found)


def test_what_is_not_known_before_it_steps_says_so(tmp_path):
    model, _ = make()
    hook = recorder(on_train_start=("optimizer",))
    with (
        pytest.raises(NotSuppliedError, match=r"attach\(model, optimizer, …\)"),
        hookline.attach(model, hooks=[hook]),
    ):
        hook.told[0][1]["optimizer"].state_dict()


def sgd_by_hand(model, data, lr=0.1):
    """As word_language_model's: no optimizer at all."""
    for x, y in data:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-lr)


def test_a_loop_without_an_optimizer_is_told_which_hooks_miss_it(caplog):
    plain, _ = make()
    sgd_by_hand(plain, batches(4))
    model, _ = make()
    hook = recorder("on_before_forward", "on_after_backward", on_step_end=("loss",))
    with hookline.attach(model, hooks=[hook]):
        data = batches(4)
        sgd_by_hand(model, data[:1])
        assert "HookRunner" not in caplog.text
        sgd_by_hand(model, data[1:])
        assert "Gradients were dropped, and no optimizer has stepped" in caplog.text
        assert caplog.text.count("HookRunner") == 1
        assert "recorder (Recorder.on_step_end) is not called" in caplog.text
        assert "on_after_backward" not in caplog.text
    assert caplog.text.count("The loop has ended, and no optimizer has stepped") == 1
    assert hook.told == ["on_before_forward", "on_after_backward"] * 4
    assert same(weights(model), weights(plain))


# -- scalers that attach was not given ------------------------------------------------------------


def scaled_loop(model, optimizer, scaler, data, *, accumulate=1, clip=False):
    losses = []
    for i, (x, y) in enumerate(data):
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        scaler.scale(loss / accumulate).backward()
        if i % accumulate == accumulate - 1:
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses


def overflowing(n):
    data = batches(n)
    data[1] = (data[1][0], torch.full_like(data[1][1], float("inf")))
    return data


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_a_scaler_that_was_not_given_is_found(clip, late, tmp_path):
    plain, _ = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled_loop(plain, torch.optim.Adam(plain.parameters()), scaler, overflowing(4), clip=clip)
    model, _ = make()
    optimizer = torch.optim.Adam(model.parameters())
    own = torch.amp.GradScaler("cpu", init_scale=1024.0)
    hook = recorder("on_gradients_ready", "on_step_skipped", on_step_end=("loss", "grad_norm"))
    with hookline.attach(model, *([] if late else [optimizer]), hooks=[hook]) as session:
        losses = scaled_loop(model, optimizer, own, overflowing(4), clip=clip)
        assert session.scaler is own
        session.save_checkpoint(tmp_path / "saved", wait=True)
    assert same(weights(model), weights(plain))
    assert own.state_dict() == scaler.state_dict()
    ends = told_in(hook, "on_step_end")
    assert [float(end["loss"]) for end in ends] == losses
    assert 0 < ends[0]["grad_norm"] < 100  # 1024 times as large if it were scaled
    assert hook.told[2:4] == ["on_gradients_ready", "on_step_skipped"]
    with hookline.attach(model, optimizer, scaler=own) as session:
        own.update(new_scale=3.0)
        session.load_checkpoint(tmp_path / "saved")
        assert own.get_scale() == scaler.get_scale()


def test_the_losses_of_its_first_step_are_undivided_and_unscaled():
    model, optimizer = make()
    hook = recorder(on_step_end=("loss",))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = scaled_loop(model, optimizer, scaler, batches(4), accumulate=2)
    found = [float(told["loss"]) for told in told_in(hook, "on_step_end")]
    assert found == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])


def test_losses_that_were_changed_after_scaling_are_unscaled_when_the_scaler_is_found():
    model, optimizer = make()
    hook, losses = recorder(on_step_end=("loss",)), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, y in batches(3):
            loss = F.mse_loss(model(x), y)
            (scaler.scale(loss) + 0.0).backward()  # not on what the scaler has returned
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert [float(told["loss"]) for told in told_in(hook, "on_step_end")] == losses


def test_a_scaler_that_comes_in_a_later_step_is_found():
    model, optimizer = make()
    hook = recorder("on_step_skipped", on_step_end=("loss",))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = train(model, optimizer, batches(3))
        losses += scaled_loop(model, optimizer, scaler, overflowing(3))
    assert [float(told["loss"]) for told in told_in(hook, "on_step_end")] == losses
    assert hook.told.count("on_step_skipped") == 1


def test_the_scaler_of_another_model_is_left_alone():
    model, optimizer = make()
    other, its_optimizer = make(seed=3)
    scaler = torch.amp.GradScaler("cpu")
    with hookline.attach(model, optimizer, hooks=[recorder(on_step_end=("loss",))]) as session:
        scaled_loop(other, its_optimizer, scaler, batches(2))
        train(model, optimizer, batches(2))
        assert session.scaler is None
        assert session.step == 2


def test_a_second_scaler_is_refused():
    model, optimizer = make()
    first, second = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    with (
        pytest.raises(LoopError, match="second GradScaler"),
        hookline.attach(model, optimizer, hooks=[recorder("on_step_end")], scaler=first),
    ):
        scaled_loop(model, optimizer, second, batches(2))


def test_methods_of_scalers_are_put_back():
    gc.collect()  # sessions of other tests
    kind = torch.amp.GradScaler
    before = kind.scale, kind.unscale_, kind.step
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[recorder("on_step_end")]):
        assert kind.step is not before[2]
    assert (kind.scale, kind.unscale_, kind.step) == before


# -- a checkpoint that was loaded before they came ------------------------------------------------


def run_shop(folder, data, *, several, load=None, save=None):
    model, _ = make()
    model.drop.p = 0.0
    session = hookline.attach(model, hooks=[recorder("on_step_end")])
    if load is not None:
        session.load_checkpoint(folder / load)
    with session:
        shop = Shop(model, data, several=several)
        shop.run()
        if save is not None:
            session.save_checkpoint(folder / save, wait=True)
    return model, shop.optimizers


@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
def test_an_optimizer_that_comes_after_a_checkpoint_was_loaded_gets_its_state(
    several, tmp_path, caplog
):
    data = batches(6)
    whole, _ = run_shop(tmp_path, data, several=several)
    run_shop(tmp_path, data[:3], several=several, save="saved")
    resumed, _ = run_shop(tmp_path, data[3:], several=several, load="saved", save="again")
    assert same(weights(resumed), weights(whole))
    assert caplog.text == ""
    given, _ = make(seed=4)
    session = hookline.attach(given, two_optimizers(given) if several else optimizers_like(given))
    session.load_checkpoint(tmp_path / "again")  # has their states, as any other
    assert same(weights(given), weights(whole))


def optimizers_like(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_states_that_wait_are_saved_again(tmp_path):
    run_shop(tmp_path, batches(2), several=False, save="saved")
    model, _ = make()
    session = hookline.attach(model, hooks=[])
    session.load_checkpoint(tmp_path / "saved")
    with session:
        session.save_checkpoint(tmp_path / "again", wait=True)
    first, second = (
        hookline.integrations.bare_loop.session_saves.load_checkpoint(tmp_path / name).state
        for name in ("saved", "again")
    )
    torch.testing.assert_close(second["optimizers"], first["optimizers"], rtol=0, atol=0)
    assert second["classes"] == first["classes"]


def test_a_late_optimizer_of_another_class_is_refused_in_its_first_step(tmp_path):
    run_shop(tmp_path, batches(2), several=False, save="saved")
    model, _ = make()
    session = hookline.attach(model, hooks=[recorder("on_step_end")])
    session.load_checkpoint(tmp_path / "saved")
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = "is AdamW in the checkpoint and SGD here"
    with pytest.raises(hookline.CheckpointError, match=message), session:
        train(model, optimizer, batches(1))
    assert same(weights(model), before)


def test_a_late_optimizer_whose_rate_the_loop_sets_is_warned_about(tmp_path, caplog):
    run_shop(tmp_path, batches(2), several=False, save="saved")
    model, _ = make()
    session = hookline.attach(model, hooks=[recorder("on_step_end")])
    session.load_checkpoint(tmp_path / "saved")
    with session:
        train(model, torch.optim.AdamW(model.parameters(), lr=0.5), batches(1))
    assert "is now that of the checkpoint" in caplog.text


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_a_scaler_that_comes_after_a_checkpoint_was_loaded_gets_its_state(late, tmp_path, caplog):
    def run(data, load=None, save=None):
        model, _ = make()
        model.drop.p = 0.0
        optimizer = torch.optim.Adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        hooks = [recorder(on_step_end=("loss", "grad_norm"))]
        session = hookline.attach(model, *([] if late else [optimizer]), hooks=hooks)
        if load is not None:
            session.load_checkpoint(tmp_path / load)
        with session:
            losses = scaled_loop(model, optimizer, scaler, data)
            if save is not None:
                session.save_checkpoint(tmp_path / save, wait=True)
        found = [float(told["loss"]) for told in told_in(hooks[0], "on_step_end")]
        assert found == pytest.approx(losses)
        return model, scaler

    data = batches(7)
    whole, its_scaler = run(data)
    run(data[:3], save="saved")
    resumed, scaler = run(data[3:], load="saved")
    assert scaler.state_dict() == its_scaler.state_dict()
    assert same(weights(resumed), weights(whole))
    assert caplog.text == ""


def test_a_state_that_still_waits_after_the_first_step_is_reported_once(tmp_path, caplog):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookline.attach(model, optimizer, scaler=scaler) as session:
        scaled_loop(model, optimizer, scaler, batches(1))
        session.save_checkpoint(tmp_path / "saved", wait=True)
    session = hookline.attach(model, optimizer)
    session.load_checkpoint(tmp_path / "saved")
    assert caplog.text == ""
    with session:
        train(model, optimizer, batches(1))
        assert "the state of the scaler, which was not seen in the first step" in caplog.text
        train(model, optimizer, batches(2))
    assert caplog.text.count("not seen in the first step") == 1


def test_a_state_that_waits_is_not_for_the_scaler_of_another_model(tmp_path):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hookline.attach(model, optimizer, scaler=scaler) as session:
        scaled_loop(model, optimizer, scaler, batches(1))
        session.save_checkpoint(tmp_path / "saved", wait=True)
    other, its_optimizer = make(seed=3)
    its_scaler, own = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    session = hookline.attach(model, optimizer, hooks=[recorder("on_step_end")])
    session.load_checkpoint(tmp_path / "saved")
    with session:
        scaled_loop(other, its_optimizer, its_scaler, batches(1))
        scaled_loop(model, optimizer, own, batches(1))
        assert session.scaler is own
    assert (its_scaler.get_scale(), own.get_scale()) == (8.0, 1024.0)


class ChangesGradients(torch.optim.SGD):
    """Computes in the gradients, as Muon does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.1)
        return super().step(closure)


OPTIMIZERS = {
    "own": ChangesGradients,
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "sgd": torch.optim.SGD,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("driver", ["bare loop", "trainer"])
def test_the_norm_is_that_before_an_optimizer_that_changes_gradients(kind, driver) -> None:
    class Norms(hookline.Hook):
        def __init__(self) -> None:
            self.expected: list[float] = []
            self.seen: list[float] = []

        def on_before_optimizer_step(self, model):
            gradients = [p.grad for p in model.parameters()]
            self.expected.append(nn.utils.get_total_norm(gradients).item())

        def on_step_end(self, grad_norm):
            self.seen.append(grad_norm)

    torch.manual_seed(0)
    model, hook = nn.Linear(4, 1), Norms()
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01)
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
    if driver == "trainer":
        trainer = hookline.Trainer(None, model, optimizer, loss_fn=F.mse_loss, hooks=[hook])
        trainer.fit(data)
    else:
        with hookline.attach(model, optimizer, hooks=[hook]):
            for x, y in data:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert hook.seen == pytest.approx(hook.expected)
    assert len(hook.seen) == 4


class Combined:
    """Steps two optimizers, as in modded-nanogpt; its state is a list, which cannot be loaded."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self):
        for each in self.optimizers:
            each.step()

    def zero_grad(self, **options):
        for each in self.optimizers:
            each.zero_grad(**options)

    def state_dict(self):
        return [each.state_dict() for each in self.optimizers]


def test_the_optimizers_that_another_object_steps_can_be_attached_and_saved(tmp_path) -> None:
    saving = {"name": "model_checkpoint", "every_n_steps": 2}
    for inner in (False, True):
        model, _ = make()
        combined = Combined(two_optimizers(model))
        hook = recorder(on_step_end=("step",))
        optimizer = combined.optimizers if inner else combined
        session = hookline.attach(model, optimizer, hooks=[hook, saving], runs=tmp_path)
        if not inner:
            with pytest.raises(LoopError, match="attach those instead"):
                train(model, combined, batches(4))
            session.detach()
            continue
        with session:
            train(model, combined, batches(4))
        assert (session.run.checkpoints / "epoch=0-step=4").is_dir()
        assert [told["step"] for told in told_in(hook, "on_step_end")] == [1, 2, 3, 4]
