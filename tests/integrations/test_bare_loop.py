"""A loop that is not ours, unchanged: what hooks see of it."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import weakref

import pytest
import torch
from loops import ALL_EVENTS, batches, make, recorder, same, snapshot, train, weights
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.events import LOOP_MAP


def test_a_hook_gets_step_loss_norm_and_rate_of_a_loop_that_was_not_changed():
    class Watch(hookline.Hook):
        def __init__(self):
            self.rows = []

        def on_step_end(self, step, loss, grad_norm, lr):
            self.rows.append((step, float(loss), float(grad_norm), lr))

    watch = Watch()
    model, optimizer = make()
    norms = []
    with hookline.attach(model, optimizer, hooks=[watch]):
        losses = train(
            model,
            optimizer,
            batches(3),
            lambda: norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()])),
        )
    assert [row[0] for row in watch.rows] == [1, 2, 3]
    assert [row[1] for row in watch.rows] == losses
    assert [row[2] for row in watch.rows] == [norm.item() for norm in norms]
    assert [row[3] for row in watch.rows] == [0.1] * 3


def test_the_rate_is_the_one_that_the_step_used():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    hook = recorder(on_step_end=("lr",))
    with hookline.attach(model, optimizer, hooks=[hook], schedulers=scheduler) as session:
        for batch in batches(3):
            train(model, optimizer, [batch])
            scheduler.step()
        assert session.schedulers == [scheduler]
    assert [arguments["lr"] for _, arguments in hook.told] == [0.1, 0.05, 0.025]


def test_the_events_of_a_real_loop_come_in_the_order_of_the_loop_map():
    """Every event of the map but those that need AMP, an exception or a skip, in its order."""
    hook = recorder(*ALL_EVENTS)
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]) as session, session.epoch():
        for x, y in session.batches(batches(1)):
            session.backward(F.mse_loss(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with session.validation():
            for _ in session.batches(batches(1)):
                pass
        session.notify_checkpoint_saved("somewhere")
    in_map = re.findall(r"\bon_\w+", LOOP_MAP)
    not_here = {"on_step_skipped", "on_exception"}
    batch_events = {"on_validation_batch_start", "on_validation_batch_end"}  # "batches" in the map
    assert [e for e in hook.told if e not in batch_events | {"on_checkpoint_save"}] == [
        event for event in in_map if event not in not_here
    ]
    inside = hook.told[hook.told.index("on_validation_start") : hook.told.index("on_epoch_end")]
    assert inside == [
        "on_validation_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_checkpoint_save",
    ]


@pytest.mark.parametrize(
    "events",
    [("on_step_end",), ("on_after_backward", "on_gradients_ready"), ("on_after_forward",), ()],
    ids=["step", "gradients", "forward", "nothing"],
)
def test_attaching_changes_no_bit_of_training(events):
    plain, optimizer = make()
    plain_losses = train(plain, optimizer, batches(20))
    model, optimizer = make()
    asks = {"on_step_end": ("loss", "grad_norm", "ctx", "state")} if "on_step_end" in events else {}
    with hookline.attach(model, optimizer, hooks=[recorder(*events, **asks)]):
        losses = train(model, optimizer, batches(20))
    assert losses == plain_losses
    assert same(weights(model), weights(plain))


def test_gradients_are_there_from_gradients_ready_to_step_end_and_are_those_used():
    seen = {}

    class Gradients(hookline.Hook):
        def on_gradients_ready(self, model):
            seen["ready"] = model.first.weight.grad.clone()

        def on_before_optimizer_step(self, model):
            seen["before"] = model.first.weight.grad.clone()

        def on_after_optimizer_step(self, model):
            seen["after"] = model.first.weight.grad.clone()

        def on_step_end(self, model):
            seen["end"] = model.first.weight.grad.clone()

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Gradients()]):
        before = model.first.weight.detach().clone()
        train(model, optimizer, batches(1))
    used = (before - model.first.weight.detach()) / 0.1
    for name in ("ready", "before", "after", "end"):
        torch.testing.assert_close(seen[name], used, rtol=1e-4, atol=1e-6)
        assert torch.equal(seen[name], seen["ready"])


def test_several_forwards_and_one_backward_make_one_step():
    hook = recorder(
        "on_before_forward",
        "on_after_forward",
        "on_after_backward",
        on_step_end=("loss",),
    )
    model, optimizer = make()
    (a, y), (b, _) = batches(2)
    with hookline.attach(model, optimizer, hooks=[hook]):
        loss = F.mse_loss(model(a) + model(b), y)
        loss.backward()
        optimizer.step()
    forward = ["on_before_forward", "on_after_forward"]
    assert hook.told[:-1] == [*forward, *forward, "on_after_backward"]
    assert float(hook.told[-1][1]["loss"]) == loss.item()


def test_the_graph_is_not_kept_alive():
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[recorder("on_after_forward", "on_step_end")]):
        x, y = batches(1)[0]
        output = model(x)
        seen = weakref.ref(output)
        F.mse_loss(output, y).backward()
        optimizer.step()
        del output
        gc.collect()
        assert seen() is None


def test_calls_under_no_grad_are_not_training():
    hook = recorder("on_before_forward", "on_after_forward")
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        with torch.no_grad():
            model(batches(1)[0][0])
        assert hook.told == []
        train(model, optimizer, batches(1))
    assert hook.told == ["on_before_forward", "on_after_forward"]


def test_a_forward_that_raises_is_followed_by_ordinary_ones():
    hook = recorder("on_before_forward", "on_after_forward")
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        assert hook.told == ["on_before_forward"]
        try:
            raise ValueError("a loop may retry while it handles an error")
        except ValueError:
            train(model, optimizer, batches(1))
    assert hook.told == ["on_before_forward", "on_before_forward", "on_after_forward"]


def test_a_batch_that_the_loop_drops_does_not_count_as_accumulation():
    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        train(model, optimizer, batches(1))
        (x, y), (x2, y2) = batches(2, seed=5)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()  # and no step: the loop did not like it
        optimizer.zero_grad()
        loss = F.mse_loss(model(x2), y2)
        loss.backward()
        optimizer.step()
    assert session.step == 2
    assert float(hook.told[-1][1]["loss"]) == loss.item()


def test_gradients_that_are_zeroed_in_place_begin_a_new_step_too():
    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    losses = []
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, y in batches(3):
            optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert [float(arguments["loss"]) for _, arguments in hook.told] == losses


def test_the_loss_is_found_when_backward_is_called_as_a_function_or_in_a_thread():
    import threading

    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    x, y = batches(1)[0]
    with hookline.attach(model, optimizer, hooks=[hook]):
        loss = F.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()

        def work() -> None:
            optimizer.zero_grad()
            losses.append(F.mse_loss(model(x), y))
            losses[0].backward()
            optimizer.step()

        losses: list[torch.Tensor] = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [float(a["loss"]) for _, a in hook.told] == [loss.item(), losses[0].item()]


# -- detaching ------------------------------------------------------------------------------------


def everything() -> hookline.Hook:
    return recorder("on_before_forward", "on_after_backward", "on_gradients_ready", "on_step_end")


def test_detaching_leaves_model_and_optimizer_exactly_as_they_were():
    model, optimizer = make()
    mine = model.register_forward_hook(lambda *args: None)
    optimizer.register_step_post_hook(lambda *args: None)
    before = snapshot(model), snapshot(optimizer)
    with hookline.attach(model, optimizer, hooks=[everything()]):
        assert (snapshot(model), snapshot(optimizer)) != before
    assert (snapshot(model), snapshot(optimizer)) == before
    mine.remove()


def test_outputs_that_outlive_the_session_are_left_alone():
    model, optimizer = make()
    hook = everything()
    with hookline.attach(model, optimizer, hooks=[hook]):
        output = model(batches(1)[0][0])
    told = list(hook.told)
    output.sum().backward()
    assert hook.told == told
    assert not output._backward_hooks


def test_two_sessions_at_once_both_see_everything_and_leave_in_any_order():
    model, optimizer = make()
    before = snapshot(model)
    first, second = everything(), recorder(on_step_end=("loss",))
    a = hookline.attach(model, optimizer, hooks=[first])
    b = hookline.attach(model, optimizer, hooks=[second])
    train(model, optimizer, batches(2))
    a.detach()
    losses = train(model, optimizer, batches(1))
    b.detach()
    assert first.told.count("on_step_end") == 2
    assert len(second.told) == 3
    assert float(second.told[-1][1]["loss"]) == losses[0]
    assert snapshot(model) == before


def test_without_with_training_starts_at_the_first_thing_seen_and_detach_ends_it():
    hook = recorder("on_train_start", "on_step_end", "on_train_end")
    model, optimizer = make()
    session = hookline.attach(model, optimizer, hooks=[hook])
    assert hook.told == []
    train(model, optimizer, batches(1))
    session.detach()
    session.detach()
    assert hook.told == ["on_train_start", "on_step_end", "on_train_end"]


@pytest.mark.parametrize("times", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_thousands_of_rounds_of_attaching_leave_no_trace(times):
    model, optimizer = make()
    before = snapshot(model)
    sessions = []
    for i in range(times):
        session = hookline.attach(model, optimizer, hooks=[recorder("on_after_forward")])
        if i % 100 == 0:
            sessions.append(weakref.ref(session))
        session.detach()
    del session
    gc.collect()
    assert [ref() for ref in sessions] == [None] * len(sessions)
    assert snapshot(model) == before
    assert not optimizer._optimizer_step_pre_hooks


def test_copies_and_pickles_of_an_attached_model_are_free_of_hooks():
    hook = everything()
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for other in (copied, loaded):
            other(batches(1)[0][0]).sum().backward()
    assert "on_before_forward" not in hook.told


def test_hooks_that_need_nothing_of_the_model_put_nothing_on_it():
    model, optimizer = make()
    session = hookline.attach(model, optimizer, hooks=[recorder("on_step_end")])
    assert not model._forward_hooks
    session.add_hook(recorder("on_after_forward"), "forward")
    assert model._forward_hooks
    session.disable_hook("forward")
    assert not model._forward_hooks
    session.enable_hook("forward")
    assert model._forward_hooks
    session.remove_hook("forward")
    assert not model._forward_hooks
    session.detach()


def test_a_hook_that_is_enabled_by_another_in_the_middle_of_a_step_joins_in():
    late = recorder("on_after_backward", "on_step_end")

    class Switch(hookline.Hook):
        def on_step_end(self, trainer, step):
            if step == 2:
                trainer.enable_hook("late")

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Switch()]) as session:
        session.add_hook(late, "late", enabled=False)
        train(model, optimizer, batches(4))
    assert late.told == ["on_after_backward", "on_step_end"] * 2


def test_the_hook_that_everybody_writes_costs_few_calls_and_operations():
    class Watch(hookline.Hook):
        def on_step_end(self, step, loss, grad_norm, lr):
            float(loss), float(grad_norm)

    calls: list[str] = []

    def count(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and ("/hookline/" in name or name.startswith("<")):
            calls.append(frame.f_code.co_qualname)

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Watch()]):
        train(model, optimizer, batches(70))  # the first calls of hooks are timed
        with torch.profiler.profile() as profile:
            train(model, optimizer, batches(1))
        sys.setprofile(count)
        train(model, optimizer, batches(1))
        sys.setprofile(None)
    operations = {each.key: each.count for each in profile.key_averages()}
    assert operations["aten::_foreach_norm"] == operations["aten::stack"] == 1
    assert len(calls) <= 36, calls  # Python calls are what most of its time is spent on
