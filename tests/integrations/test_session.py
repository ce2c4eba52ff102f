"""The calls of a session: what a loop can tell hooks that nobody can see from outside."""

from __future__ import annotations

import copy
import logging
import math
import threading

import pytest
import torch
from loops import batches, make, recorder, train
from torch.nn import functional as F

import hookline
from hookline import NotSuppliedError
from hookline.errors import ArgumentError


def tell(*events, **asks):
    """A recorder on a fresh model in a session."""
    hook = recorder(*events, **asks)
    model, optimizer = make()
    return hook, model, optimizer


def test_batches_are_told_with_their_numbers_and_the_loaders_name():
    asks = ("batch", "batch_idx", "dataloader_idx", "dataloader_name")
    hook, model, optimizer = tell(on_train_batch_start=asks, on_train_batch_end=asks)
    data = batches(2)
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for x, y in session.batches(data, name="web", idx=3):
            train(model, optimizer, [(x, y)])
    numbers = [(name, a["batch_idx"], a["dataloader_idx"]) for name, a in hook.told]
    start, end = "on_train_batch_start", "on_train_batch_end"
    assert numbers == [(start, 0, 3), (end, 0, 3), (start, 1, 3), (end, 1, 3)]
    assert {a["dataloader_name"] for _, a in hook.told} == {"web"}
    assert hook.told[2][1]["batch"] is data[1]


def test_a_batch_ends_with_the_step_it_completes_or_when_the_next_is_drawn():
    hook, model, optimizer = tell(
        "on_after_optimizer_step", "on_step_end", on_train_batch_end=("batch_idx", "step")
    )
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for i, (x, y) in enumerate(session.batches(batches(4))):
            session.backward(F.mse_loss(model(x), y), accumulate=2)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    end = [("on_train_batch_end", {"batch_idx": i, "step": (i + 1) // 2}) for i in range(4)]
    step = ["on_after_optimizer_step", "on_step_end"]
    assert hook.told == [end[0], step[0], end[1], step[1], end[2], step[0], end[3], step[1]]


def test_a_batch_without_backward_has_no_loss_and_costs_no_hook():
    hook, model, optimizer = tell(on_train_batch_end=("loss",), on_epoch_end=("metrics",))
    with hookline.attach(model, optimizer, hooks=[hook]) as session, session.epoch():
        for i, (x, y) in enumerate(session.batches(batches(4))):
            if i % 2:  # also the first batch has none
                train(model, optimizer, [(x, y)])
    *losses, (_, last) = hook.told
    losses = [float(asked["loss"]) for _, asked in losses]
    assert [math.isnan(loss) for loss in losses] == [True, False, True, False]
    assert last["metrics"]["train/loss"] == pytest.approx((losses[1] + losses[3]) / 2)


def test_backward_tells_the_batchs_own_loss_and_the_steps_mean():
    hook, model, optimizer = tell(
        on_before_backward=("loss",), on_train_batch_end=("loss", "metrics"), on_step_end=("loss",)
    )
    plain, plain_optimizer = make()
    model.eval()  # without dropout, so that the two can be compared
    plain.eval()
    own = []
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for x, y in session.batches(batches(2)):
            loss = F.mse_loss(model(x), y)
            own.append(loss.item())
            session.backward(loss, accumulate=2)
            if len(own) == 2:
                optimizer.step()
    for x, y in batches(2):
        (F.mse_loss(plain(x), y) / 2).backward()
    plain_optimizer.step()
    torch.testing.assert_close(model.first.weight, plain.first.weight)
    told = {name: [a for n, a in hook.told if n == name] for name, _ in hook.told}
    assert [a["loss"].item() for a in told["on_before_backward"]] == [x / 2 for x in own]
    assert [float(a["loss"]) for a in told["on_train_batch_end"]] == own
    assert [a["metrics"]["loss"] for a in told["on_train_batch_end"]] == own
    assert float(told["on_step_end"][0]["loss"]) == pytest.approx(sum(own) / 2)


def test_numbers_are_not_read_from_the_device_until_somebody_looks(monkeypatch):
    class Keep(hookline.Hook):
        def on_train_batch_end(self, loss: hookline.LazyFloat, metrics, state):
            self.metrics = metrics

        def on_step_end(self, loss: hookline.LazyFloat, grad_norm: hookline.LazyFloat, ctx):
            pass

    hook = Keep()
    model, optimizer = make()
    reads = []
    for name in ("item", "__float__", "tolist"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, original=original: reads.append(1) or original(self)
        )
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for x, y in session.batches(batches(2)):
            optimizer.zero_grad()
            session.log("size", torch.tensor(4.0))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert reads == []
    assert hook.metrics["size"] == 4.0
    assert reads


def test_validation_is_told_with_means_and_under_both_names():
    hook, model, optimizer = tell(
        on_validation_start=("epoch",),
        on_validation_batch_start=("batch_idx", "dataloader_name"),
        on_validation_batch_end=("loss", "metrics"),
        on_eval_end=("metrics", "step"),
        on_epoch_end=("metrics",),
        on_step_end=("loss",),
    )
    with hookline.attach(model, optimizer, hooks=[hook]) as session, session.epoch():
        for x, y in session.batches(batches(1)):
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            with session.validation(), torch.no_grad():
                for value in session.batches([1.0, 3.0]):
                    session.log("loss", torch.tensor(value))
            model(x)
    told = dict(hook.told)
    assert told["on_validation_batch_start"] == {"batch_idx": 1, "dataloader_name": "val"}
    assert float(told["on_validation_batch_end"]["loss"]) == 3.0
    assert told["on_eval_end"]["metrics"]["val/loss"] == 2.0
    assert told["on_eval_end"]["metrics"]["eval/loss"] == 2.0
    assert told["on_eval_end"]["metrics"]["eval/perplexity"] == pytest.approx(7.389, rel=1e-3)
    assert told["on_eval_end"]["step"] == 1
    assert told["on_epoch_end"]["metrics"]["val/loss"] == 2.0


def test_means_of_half_precision_numbers_are_not_rounded_on_the_way():
    hook, model, optimizer = tell(on_validation_end=("metrics",))
    with hookline.attach(model, optimizer, hooks=[hook]) as session, session.validation():
        for _ in range(1000):
            session.log("loss", torch.tensor(1.0, dtype=torch.bfloat16))
    assert hook.told[0][1]["metrics"]["val/loss"] == 1.0


def test_what_a_user_hook_puts_into_metrics_hooks_after_it_see():
    class Adds(hookline.Hook):
        def on_validation_end(self, metrics):
            metrics["val/accuracy"] = 0.75

    hook, model, optimizer = tell(on_validation_end=("metrics",))
    with hookline.attach(model, optimizer, hooks=[Adds(), hook]) as session:
        with session.validation():
            session.log("loss", 1.0)
        assert hook.told[0][1]["metrics"]["val/accuracy"] == 0.75
        assert session.best_accuracy == 0.75


def test_a_checkpoint_that_the_loop_has_saved_is_told():
    hook, model, optimizer = tell(on_checkpoint_save=("path", "step"))
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        train(model, optimizer, batches(1))
        session.notify_checkpoint_saved("b.pt")
    assert hook.told == [("on_checkpoint_save", {"path": "b.pt", "step": 1})]


@pytest.mark.parametrize("how", ["input_ids", "function"])
def test_tokens_are_counted(how):
    hook, model, optimizer = tell(on_step_end=("tokens_seen", "ctx"), on_train_end=("tokens_seen",))
    count = "auto" if how == "input_ids" else lambda batch: batch["x"].shape[0] * 3
    data = [{"input_ids": torch.zeros(2, 6), "x": x, "y": y} for x, y in batches(2)]
    with hookline.attach(model, optimizer, hooks=[hook], tokens=count) as session:
        for batch in session.batches(data):
            train(model, optimizer, [(batch["x"], batch["y"])])
    assert [a["tokens_seen"] for _, a in hook.told] == [12, 24, 24]
    assert hook.told[1][1]["ctx"].tokens_seen == 24


def test_integer_inputs_are_counted_as_tokens_unless_tokens_is_none():
    data = [(torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6)) for _ in range(2)]
    hook, model, optimizer = tell(on_step_end=("tokens_seen",))
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for _ in session.batches(data):
            train(model, optimizer, batches(1))
    assert [a["tokens_seen"] for _, a in hook.told] == [12, 24]
    session = hookline.attach(model, optimizer, hooks=[hook], tokens=None)
    with pytest.raises(NotSuppliedError, match="tokens"), session:
        for _ in session.batches(data):
            train(model, optimizer, batches(1))


def test_the_step_context_is_the_step():
    hook, model, optimizer = tell(on_step_end=("ctx",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = train(model, optimizer, batches(1))
        ctx = hook.told[0][1]["ctx"]
    assert (ctx.step, ctx.loss, ctx.lr, ctx.skipped) == (1, losses[0], 0.1, False)
    assert ctx.model is model
    assert ctx.optimizer is optimizer
    with pytest.raises(NotSuppliedError, match="attach"):
        _ = ctx.tokens_seen
    assert f"loss={losses[0]!r}" in repr(ctx)
    assert "tokens_seen=<not provided>" in repr(ctx)
    assert ctx == copy.copy(ctx)


def test_a_step_context_that_is_kept_has_the_norm_of_its_step():
    class Norm(hookline.Hook):
        def __init__(self):
            self.kept = []

        def on_step_end(self, ctx, grad_norm):
            self.kept.append((ctx, grad_norm))

    hook = Norm()
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, batches(3))
    assert [ctx.grad_norm for ctx, _ in hook.kept] == [norm for _, norm in hook.kept]
    assert len({norm for _, norm in hook.kept}) == 3


def test_the_state_has_the_keys_of_a_small_trainer():
    hook, model, optimizer = tell(on_batch_end=("state",))
    with hookline.attach(model, optimizer, hooks=[hook]) as session, session.epoch():
        losses = []
        for x, y in session.batches(batches(2)):
            losses += train(model, optimizer, [(x, y)])
    state = dict(hook.told[-1][1]["state"])
    assert state.pop("model") is model
    assert state.pop("optimizer") is optimizer
    assert state == {
        "device": torch.device("cpu"),
        "current_epoch": 0,
        "current_batch_idx": 1,
        "latest_loss": losses[1],
        "avg_loss": pytest.approx(sum(losses) / 2),
        "model_params": sum(p.numel() for p in model.parameters()),
        "status": "training",
    }


@pytest.mark.parametrize("value", ["3", None, torch.ones(2), True, [1.0]])
def test_log_takes_numbers_only(value):
    _, model, optimizer = tell()
    with (
        hookline.attach(model, optimizer) as session,
        pytest.raises(TypeError, match="a number or a tensor with one element"),
    ):
        session.log("x", value)


def test_backward_takes_a_loss_only():
    _, model, optimizer = tell()
    with (
        hookline.attach(model, optimizer) as session,
        pytest.raises(TypeError, match="a tensor with one element"),
    ):
        session.backward(torch.ones(3, requires_grad=True))


def test_session_backward_is_seen_also_when_the_models_output_cannot_be_looked_into():
    class Opaque:
        def __init__(self, value):
            self.value = value

    class Hidden(torch.nn.Linear):
        def forward(self, x):
            return Opaque(super().forward(x))

    model = Hidden(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = recorder("on_after_backward", "on_gradients_ready", on_step_end=("loss",))
    x, y = batches(1)[0]
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        loss = F.mse_loss(model(x).value, y)
        session.backward(loss)
        optimizer.step()
    assert hook.told[:2] == ["on_after_backward", "on_gradients_ready"]
    assert float(hook.told[2][1]["loss"]) == loss.item()


def test_a_batch_that_the_loop_drops_has_its_loss_once_steps_were_seen():
    hook, model, optimizer = tell(on_train_batch_end=("batch_idx", "loss"))
    losses = []
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for i, (x, y) in enumerate(session.batches(batches(3))):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            loss.backward()
            if i != 1:  # the loop did not like this one
                optimizer.step()
    assert [float(arguments["loss"]) for _, arguments in hook.told] == losses


def test_a_step_that_was_not_clipped_has_the_norm_of_its_own_gradients():
    hook, model, optimizer = tell(on_gradient_clip=(), on_step_end=("grad_norm",))
    parameters = list(model.parameters())
    with hookline.attach(model, optimizer, hooks=[hook]):
        clip = torch.nn.utils.clip_grad_norm_
        train(model, optimizer, batches(1), lambda: clip(parameters, 0.01))
        train(model, optimizer, batches(1, seed=7))
        second = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(hook.told[-1][1]["grad_norm"]) == second.item()


def test_updates_lets_hooks_read_gradients_before_the_loop_clips_them():
    norms = []

    class Norms(hookline.Hook):
        def on_gradients_ready(self, model):
            norms.append(model.first.weight.grad.norm().item())

        def on_before_optimizer_step(self, model):
            norms.append(model.first.weight.grad.norm().item())

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Norms()]) as session:

        def clip():
            session.updates()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        train(model, optimizer, batches(2), clip)
    assert len(norms) == 4
    assert norms[0] > 0.02 > 0.011 > norms[1]


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("bad"), "error"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_exception_is_told_and_goes_on(error, status):
    hook, model, optimizer = tell(on_exception=("exception",), on_train_end=("status",))
    with (
        pytest.raises(type(error)) as raised,
        hookline.attach(model, optimizer, hooks=[hook]) as session,
    ):
        train(model, optimizer, batches(1))
        raise error
    assert raised.value is error
    assert hook.told == [
        ("on_exception", {"exception": error}),
        ("on_train_end", {"status": status}),
    ]
    assert session.status == status


def test_a_critical_hook_that_fails_on_the_exception_does_not_hide_it(caplog):
    class Critical(hookline.Hook):
        critical = True

        def on_exception(self):
            raise RuntimeError("I failed too")

        def on_train_end(self):
            raise RuntimeError("and again")

    ends = recorder("on_train_end")
    model, optimizer = make()
    with (
        pytest.raises(ValueError, match="the real one"),
        hookline.attach(model, optimizer, hooks=[Critical(), ends]),
    ):
        raise ValueError("the real one")
    assert "I failed too" in caplog.text
    assert ends.told == ["on_train_end"]


def test_leaving_the_process_early_is_no_failure():
    hook, model, optimizer = tell("on_exception", on_train_end=("status",))
    with pytest.raises(SystemExit), hookline.attach(model, optimizer, hooks=[hook]):
        raise SystemExit
    assert hook.told == [("on_train_end", {"status": "stopped"})]


def test_a_critical_hook_that_fails_stops_the_loop():
    class Critical(hookline.Hook):
        critical = True

        def on_step_end(self, step):
            if step == 2:
                raise RuntimeError("disk full")

    model, optimizer = make()
    with (
        pytest.raises(hookline.HookFailedError, match=r"'critical' failed.*disk full"),
        hookline.attach(model, optimizer, hooks=[Critical()]) as session,
    ):
        train(model, optimizer, batches(5))
    assert session.step == 2
    assert session.status == "error"


def test_a_stop_holds_for_all_loops_over_session_batches_that_follow():
    model, optimizer = make()
    with hookline.attach(model, optimizer) as session:
        for _ in range(3):
            with session.epoch():
                for x, y in session.batches(batches(4)):
                    train(model, optimizer, [(x, y)])
                    if session.step == 2:
                        session.stop("enough")
    assert session.step == 2


class Stops(hookline.Hook):
    def on_step_end(self, trainer):
        trainer.stop("enough")


def test_a_loop_that_does_not_look_whether_to_stop_is_warned_once(caplog):
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Stops()]) as session:
        train(model, optimizer, batches(5))
    assert session.should_stop
    assert (session.step, session.status) == (5, "completed")
    assert caplog.text.count("session.batches(loader)") == 1
    assert "asked to stop in step 1 (enough)" in caplog.text
    assert [info.failures for info in session.hooks.describe()] == [0]


def test_a_loop_that_looks_whether_to_stop_is_not_warned(caplog):
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Stops()]) as session:
        for batch in batches(5):
            train(model, optimizer, [batch])
            if session.should_stop and session.step == 3:
                break
    assert (session.step, session.status) == (3, "stopped")
    assert caplog.text == ""


def test_a_loop_that_does_not_look_ends_by_an_exception_where_asked_for():
    hook, model, optimizer = tell("on_exception", on_train_end=("status",))
    with (
        pytest.raises(hookline.StopTraining, match=r"in step 1.*enough"),
        hookline.attach(model, optimizer, hooks=[Stops(), hook], on_stop="raise") as session,
    ):
        train(model, optimizer, batches(5))
    assert session.step == 1
    assert hook.told == [("on_train_end", {"status": "stopped"})]


def test_a_session_that_has_ended_cannot_be_entered_again():
    session = hookline.attach(*make())
    with session:
        pass
    with pytest.raises(hookline.LoopError, match=r"has ended.*Attach again"), session:
        pass


def test_a_hook_may_set_should_stop():
    class Sets(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.should_stop = step == 2

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Sets()]) as session:
        for batch in session.batches(batches(5)):
            train(model, optimizer, [batch])
    assert (session.step, session.status) == (2, "stopped")


def test_nothing_is_logged_by_a_loop_in_which_all_is_well(caplog):
    hook, model, optimizer = tell("on_step_end", "on_after_backward")
    with caplog.at_level(logging.INFO), hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, batches(2))
    assert caplog.text == ""


def test_schedules_see_whole_steps():
    hook = recorder("on_gradients_ready", "on_after_backward", on_step_end=("step",))
    model, optimizer = make()
    with hookline.attach(model, optimizer) as session:
        session.add_hook(hook, every=3)
        train(model, optimizer, batches(7))
    one = ["on_after_backward", "on_gradients_ready"]
    assert hook.told == [
        *one,
        ("on_step_end", {"step": 3}),
        *one,
        ("on_step_end", {"step": 6}),
    ]


def test_a_batch_goes_on_after_a_validation_within_it():
    hook, model, optimizer = tell(on_train_batch_end=("batch_idx", "loader_name", "loss"))
    losses = []
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for idx, (x, y) in enumerate(session.batches(batches(4))):
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            loss.backward()
            if idx == 0:
                with session.validation():
                    for _ in session.batches([1, 2, 3]):
                        session.log("loss", 1.0)
            if idx % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [tuple(told.values()) for _, told in hook.told] == [
        (idx, "train", loss) for idx, loss in enumerate(losses)
    ]


def test_a_checkpoint_is_reported_with_an_epoch_only_for_a_certain_step():
    _, model, optimizer = tell()
    with hookline.attach(model, optimizer, runs=None) as session:
        with pytest.raises(ArgumentError, match="needs `step`"):
            session.notify_checkpoint_saved("last.pt", epoch=7)
        with pytest.raises(ArgumentError, match="whole number"):
            session.notify_checkpoint_saved("last.pt", step="abc")


@pytest.mark.parametrize("how", ["with a gradient", "of several tensors"])
def test_the_first_backward_of_a_thread_is_seen(how):
    hook, model, optimizer = tell(on_after_backward=())
    failed = []

    def train_in_thread():
        outputs = model(torch.ones(2, 8))
        try:
            if how == "with a gradient":
                outputs.backward(torch.ones_like(outputs))
            else:
                torch.autograd.backward([outputs.sum(), outputs.square().sum()])
            optimizer.step()
        except hookline.HooklineError as error:
            failed.append(error)

    with hookline.attach(model, optimizer, hooks=[hook]):
        thread = threading.Thread(target=train_in_thread)
        thread.start()
        thread.join()
    assert failed == []
    assert hook.told == ["on_after_backward"]
