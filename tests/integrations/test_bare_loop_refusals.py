"""Hooks that need what an unchanged loop does not provide are refused before anything changes."""

from __future__ import annotations

import argparse

import pytest
import torch
from loops import batches, make, recorder, same, train, weights
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import LoopError, NotSuppliedError


@pytest.mark.parametrize(
    ("event", "asks", "call"),
    [
        ("on_epoch_start", (), r"with session\.epoch\(\)"),
        ("on_epoch_end", (), r"with session\.epoch\(\)"),
        ("on_step_end", ("epoch",), r"with session\.epoch\(\)"),
        ("on_train_batch_start", (), r"for batch in session\.batches\(loader\)"),
        ("on_train_batch_end", (), r"for batch in session\.batches\(loader\)"),
        ("on_before_forward", ("batch",), r"for batch in session\.batches\(loader\)"),
        ("on_before_backward", (), r"session\.backward\(loss\)"),
        ("on_gradient_clip", (), "Clip with torch's functions"),
        ("on_step_end", ("tokens_seen",), r"attach\(…, tokens="),
        ("on_train_start", ("config",), r"attach\(…, config="),
        ("on_step_end", ("run",), r"no run folder"),
    ],
)
def test_what_the_loop_does_not_tell_is_refused_with_the_call_that_would(event, asks, call):
    hook = recorder(**{event: asks})
    model, optimizer = make()
    before = weights(model)
    with (
        pytest.raises(NotSuppliedError, match=call) as error,
        hookline.attach(model, optimizer, hooks=[hook]),
    ):
        train(model, optimizer, batches(2))
    assert "recorder" in str(error.value)
    assert same(weights(model), before)


def test_all_refusals_come_at_once():
    hook = recorder("on_epoch_start", "on_train_batch_end", on_step_end=("run", "tokens_seen"))
    model, optimizer = make()
    with (
        pytest.raises(NotSuppliedError) as error,
        hookline.attach(model, optimizer, hooks=[hook]),
    ):
        train(model, optimizer, batches(1))
    for word in ("on_epoch_start", "on_train_batch_end", "'run'", "'tokens_seen'"):
        assert word in str(error.value)


def test_what_is_known_before_training_is_refused_then_and_all_at_once(tmp_path):
    model, optimizer = make()
    hooks = [recorder(on_train_start=("config",)), recorder(on_step_end=("run",))]
    with (
        pytest.raises(NotSuppliedError, match=r"(?s)attach\(…, config=….*attach\(…, runs="),
        hookline.attach(model, optimizer, hooks=hooks),
    ):
        pytest.fail("training must not start")
    assert hooks[0].told == []


def test_a_batch_that_ends_before_the_first_step_has_all_refusals():
    model, optimizer = make()
    hooks = [
        recorder(on_train_batch_end=("epoch",)),
        recorder("on_epoch_start", on_train_batch_end=("tokens_seen",)),
    ]
    x, y = batches(1)[0]
    with (
        pytest.raises(NotSuppliedError) as caught,
        hookline.attach(model, optimizer, hooks=hooks) as session,
    ):
        for _ in session.batches([1, 2]):
            F.mse_loss(model(x), y).backward()
    assert str(caught.value).count("  - ") == 3


def test_a_parameter_with_a_default_is_never_refused():
    class Modest(hookline.Hook):
        def on_step_end(self, step, epoch=None, mine=-1, **rest):
            self.got = (step, epoch, mine, "lr" in rest, "tokens_seen" in rest)

    hook = Modest()
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, batches(1))
    assert hook.got == (1, None, -1, True, False)


@pytest.mark.parametrize(
    ("event", "call"),
    [
        ("on_validation_end", "session.validation()"),
        ("on_checkpoint_save", "session.save_checkpoint()"),
        ("on_checkpoint_load", "session.load_checkpoint()"),
    ],
)
def test_what_may_still_come_is_said_at_the_first_step_and_at_the_end(event, call, caplog):
    caplog.set_level("INFO")
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[recorder(event)]):
        train(model, optimizer, batches(1))
        assert call in caplog.text
        assert event in caplog.text
        train(model, optimizer, batches(5))
        assert caplog.text.count(call) == 1
    assert caplog.text.count(call) == 2
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_backward_on_many_numbers_has_no_loss():
    model, optimizer = make()
    with (
        pytest.raises(NotSuppliedError, match="was not called on a single number"),
        hookline.attach(model, optimizer, hooks=[recorder(on_step_end=("loss",))]),
    ):
        outputs = model(batches(1)[0][0])
        outputs.backward(torch.ones_like(outputs))
        optimizer.step()


def test_gradients_without_backward_have_no_loss():
    model, optimizer = make()
    x, y = batches(1)[0]
    hook = recorder("on_after_backward", "on_epoch_end", on_step_end=("loss",))
    with (
        pytest.raises(NotSuppliedError) as caught,
        hookline.attach(model, optimizer, hooks=[hook]),
    ):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert "on_after_backward), recorder (Recorder.on_step_end) needs backward" in str(caught.value)
    assert "session.epoch()" in str(caught.value)
    assert hook.told == []


@pytest.mark.parametrize("call", ["forward", "inner"])
def test_a_model_whose_own_call_is_never_seen_is_refused(call):
    model, optimizer = make()
    outer = nn.Sequential(model)
    called = model.forward if call == "forward" else model
    attached = model if call == "forward" else outer
    x, y = batches(1)[0]
    with (
        pytest.raises(NotSuppliedError, match="the attached model was not called"),
        hookline.attach(attached, optimizer, hooks=[recorder("on_after_forward")]),
    ):
        F.mse_loss(called(x), y).backward()
        optimizer.step()


def halve_gradients(model):
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def test_gradients_that_were_changed_before_hooks_could_read_them_are_refused():
    model, optimizer = make()
    before = weights(model)
    with (
        pytest.raises(LoopError, match=r"session\.updates\(\)"),
        hookline.attach(model, optimizer, hooks=[recorder("on_gradients_ready")]),
    ):
        train(model, optimizer, batches(1), lambda: halve_gradients(model))
    assert same(weights(model), before)


def test_changes_that_begin_later_are_said_once_and_training_goes_on(caplog):
    hook = recorder("on_gradients_ready")
    model, optimizer = make()
    clip = lambda: halve_gradients(model)  # noqa: E731
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        train(model, optimizer, batches(1))
        train(model, optimizer, batches(3), clip)
    assert session.step == len(hook.told) == 4
    assert caplog.text.count("session.updates()") == 1


def test_a_hook_added_later_that_cannot_be_supplied_does_not_stop_the_run(caplog):
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[recorder("on_step_end")]) as session:
        train(model, optimizer, batches(1))
        session.add_hook(recorder("on_epoch_start"))
        train(model, optimizer, batches(1))
    assert session.step == 2
    assert "session.epoch()" in caplog.text


@pytest.mark.parametrize(
    ("model", "optimizer", "error", "message"),
    [
        ("a model", None, TypeError, r"torch\.nn\.Module, not 'a.*Lightning.*Ignite"),
        (None, "adam", TypeError, "not 'adam', a str. Make it first"),
        (None, torch.optim.SGD, TypeError, "not the class SGD"),
        (None, [], TypeError, "at least one optimizer"),
        (None, 3, TypeError, "torch.optim.Optimizer"),
        (nn.Linear(2, 2), None, LoopError, "none of this model's parameters"),
    ],
)
def test_attach_says_what_it_takes(model, optimizer, error, message):
    good_model, good_optimizer = make()
    with pytest.raises(error, match=message):
        hookline.attach(
            good_model if model is None else model,
            good_optimizer if optimizer is None else optimizer,
        )


def test_the_same_optimizer_twice_is_refused():
    model, optimizer = make()
    with pytest.raises(ValueError, match="twice"):
        hookline.attach(model, [optimizer, optimizer])


def test_a_hook_is_not_refused_for_events_that_it_can_do_without(caplog):
    class Writes(hookline.Hook):
        hookline_optional_events = frozenset({"on_epoch_end", "on_validation_end"})

        def on_step_end(self): ...

        def on_epoch_end(self): ...

        def on_validation_end(self): ...

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Writes(), hookline.LoggingHook()]):
        train(model, optimizer, batches(2))
    assert "waits for" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": hookline.EMA()}, r"Write hooks=\[EMA\(…\)\]"),
        ({"tokens": 5}, r"tokens=…\) is 5; expected a function of \(batch\)"),
        ({"checkpoints": {"backgroud": True}}, "Did you mean 'background'"),
        ({"hparams": 5}, "hparams is 5; expected a mapping"),
        ({"on_stop": "explode"}, r'on_stop=…\) takes "warn"'),
    ],
)
def test_a_mistake_in_the_arguments_of_attach_is_explained(options, message):
    with pytest.raises((hookline.ArgumentError, hookline.ConfigError), match=message):
        hookline.attach(*make(), **options)


def test_parsed_command_line_arguments_are_hyperparameters():
    session = hookline.attach(*make(), hooks=None, hparams=argparse.Namespace(width=3))
    assert session.hparams == {"width": 3}
