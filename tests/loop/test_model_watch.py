"""Forward hooks observe what the model returns, and cannot change training without being named."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import numpy
import pytest
import torch
from loops import Net, batches, config, fit, make, same, weights

import hookline
from hookline import ForwardHook, ObserverError, Trainer
from hookline.hooks.monitoring.activation_stats import ActivationStats
from hookline.tensors import fingerprints, observation
from hookline.tensors.fingerprints import Comparison, Fingerprint


def test_it_is_called_for_every_batch_after_the_forward_and_before_the_loss():
    order = []

    class Looks(ForwardHook):
        def __call__(self, activations, step, batch=None):
            order.append(("forward", tuple(activations.shape), activations.requires_grad, step))

    class Loop(hookline.Hook):
        def on_after_forward(self):
            order.append("after")

        def on_before_backward(self, loss):
            order.append("loss")

    fit(Looks(), Loop(), accumulate=2)
    assert order == [
        *[("forward", (4, 4), False, 0), "after", "loss"] * 2,
        *[("forward", (4, 4), False, 1), "after", "loss"] * 2,
    ]


def test_a_plain_function_is_one_with_its_kind_and_does_not_see_validation():
    seen = []

    def look(activations):
        seen.append(activations.mean().item())

    trainer = fit(forward=[look], val=batches(3))
    assert len(seen) == 4
    info = trainer.hooks.describe()[0]
    assert (info.name, info.kind, info.calls) == ("look", "forward", 4)
    assert info.cls.endswith("look")


def test_training_is_the_same_bit_for_bit_with_and_without_observers():
    def watch(activations):
        activations.float().std()

    plain, observed = fit(), fit(ActivationStats(log_interval=1), forward=[watch])
    assert same(weights(plain.model), weights(observed.model))


def test_a_change_in_place_is_fatal_and_names_the_hook():
    def meddle(activations):
        activations.mul_(0.5)

    with pytest.raises(ObserverError, match=r"meddle changed the model's outputs in place"):
        fit(forward=[meddle])


@pytest.fixture
def no_foreign_threads(monkeypatch):
    """Hide threads that other tests of this process have left: they might use random numbers."""
    every, here = threading.enumerate, threading.current_thread()
    monkeypatch.setattr(
        threading,
        "enumerate",
        lambda: [t for t in every() if t is here or t.name.startswith("hookline")],
    )


@pytest.mark.usefixtures("no_foreign_threads")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(3),
        random.random,
        numpy.random.rand,
    ],
)
def test_random_numbers_of_training_are_put_back_and_the_hook_is_disabled(draw, caplog):
    calls = []

    def draws(activations):
        calls.append(1)
        draw()

    def draws_later(activations):
        calls.append(1)
        if len(calls) == 4:
            draw()

    def draws_its_own(activations):
        torch.randn(3, generator=torch.Generator().manual_seed(0))
        random.Random(0).random()
        numpy.random.default_rng(0).random()

    def states():
        random.seed(5)
        numpy.random.seed(5)
        numpy.random.randn()  # it keeps a second number, which is part of the state
        trainer = fit(forward=[function]) if function else fit()
        drawn = random.random(), numpy.random.randn(), numpy.random.randn()
        return trainer, (*drawn, *weights(trainer.model))

    function = None
    _, expected = states()
    for function in (draws, draws_later):
        calls.clear()
        caplog.clear()
        trainer, found = states()
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b))
            for a, b in zip(found, expected, strict=True)
        )
        assert (trainer.status, trainer.step) == ("completed", 4)
        assert len(calls) == (1 if function is draws else 4)
        (info,) = [info for info in trainer.hooks.describe() if info.name == function.__name__]
        assert (info.status, info.failures) == ("failed", 1)
        (record,) = [r for r in caplog.records if "DISABLED" in r.message]
        assert record.levelname == "WARNING"
        assert "used a global random number generator" in record.message
        assert "enable_hook" in record.message
    function = draws_its_own
    assert states()[0].hooks.summary().failures == {}


def test_in_strict_mode_drawing_random_numbers_is_an_error():
    def draws(activations):
        torch.randn(3)

    trainer = Trainer(config(), *make())
    trainer.add_hook(draws, kind="forward", strict=True)
    with pytest.raises(hookline.RandomNumberError, match="draws used a global random number gen"):
        trainer.fit(batches(4))


# -- writes that are not in-place operations -------------------------------------------------------


def through_data(activations):
    activations.data[0, 0] += 1


def through_numpy(activations):
    activations.numpy()[0, 0] += 1


def by_permuting(activations):
    activations.data.copy_(activations.flip(0))


def negating(activations):
    activations.data.neg_()


@pytest.mark.parametrize("write", [through_data, through_numpy, by_permuting, negating])
@pytest.mark.parametrize("on_device", [False, True])
def test_writes_that_torch_does_not_count_are_fatal_and_name_the_hook(
    write, on_device, monkeypatch
):
    if on_device:  # as memory of an accelerator: hashed there, compared with the next call
        monkeypatch.setattr(fingerprints, "_is_on_cpu", lambda storage: False)
    calls = []

    def observe(activations):
        calls.append(1)
        write(activations)

    with pytest.raises(ObserverError, match=r"observe changed the model's outputs in place"):
        fit(forward=[observe])
    assert len(calls) == 1


def test_writes_are_looked_for_in_the_first_calls_and_then_periodically(monkeypatch):
    monkeypatch.setattr(observation, "EVERY_CALLS", 6)
    calls = []

    def observe(activations):
        calls.append(1)
        if len(calls) > 4:
            through_data(activations)

    with pytest.raises(ObserverError, match="observe"):
        fit(forward=[observe], max_epochs=3)
    assert len(calls) == 7  # the calls are counted from 0


@pytest.mark.parametrize("on_device", [False, True])
def test_values_that_are_not_numbers_are_no_change(on_device, monkeypatch):
    if on_device:
        monkeypatch.setattr(fingerprints, "_is_on_cpu", lambda storage: False)
    values = torch.tensor([float("nan"), 1.0, float("inf")])
    a, b = Fingerprint([values]), Fingerprint([values.clone()])
    comparison = Comparison(a, b)
    assert not comparison.is_pending
    assert not comparison.differs_on_cpu
    assert not comparison.differs_on_devices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("size", [1, 1001])
def test_a_hash_on_a_device_notices_any_bit_and_any_order(dtype, size, monkeypatch):
    monkeypatch.setattr(fingerprints, "_is_on_cpu", lambda storage: False)
    monkeypatch.setattr(fingerprints, "_PIECE", 100)
    base = torch.arange(1, size + 1).to(dtype)
    bits = base.view(torch.uint8)
    changes = [base.flip(0)] if size > 1 else []
    for at in {0, len(bits) // 2, len(bits) - 1}:
        for bit in (1, 128):
            changed = base.clone()
            changed.view(torch.uint8)[at] ^= bit
            changes.append(changed)
    if dtype.is_floating_point:
        changes.append(-base)
    for changed in changes:
        assert Comparison(Fingerprint([base]), Fingerprint([changed])).differs_on_devices
    assert not Comparison(Fingerprint([base]), Fingerprint([base.clone()])).differs_on_devices


def test_a_thread_that_draws_is_not_taken_for_the_hook():
    class Slow(ForwardHook):
        def __call__(self, activations):
            drawn.clear()
            assert drawn.wait(5)

    drawn, over = threading.Event(), threading.Event()

    def draw():
        while not over.is_set():
            random.random()
            numpy.random.rand()
            drawn.set()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert fit(Slow()).status == "completed"
    finally:
        over.set()
        thread.join()


def test_a_hook_that_returns_something_is_told_that_it_is_lost(caplog):
    fit(forward=[lambda activations: activations * 2])
    assert "but what an observer returns is not used" in caplog.text


def test_a_failing_observer_does_not_stop_training():
    def fails(activations):
        raise ZeroDivisionError

    trainer = fit(forward=[fails])
    assert (trainer.status, trainer.step) == ("completed", 4)
    assert trainer.hooks.summary().failures == {"fails": 3}


@dataclass
class Outputs:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Rich(Net):
    def forward(self, x):
        hidden = self.first(x)
        return Outputs(self.second(torch.relu(hidden)), (hidden,))


def test_tensors_anywhere_in_the_outputs_are_detached_and_watched():
    seen = []

    def look(activations):
        seen.append((activations.logits.requires_grad, activations.hidden[0].requires_grad))

    def meddle(activations):
        activations.hidden[0].add_(1)

    def step_fn(model, batch):
        return model(batch[0]).logits.square().mean()

    fit(forward=[look], model=Rich(), step_fn=step_fn)
    assert seen == [(False, False)] * 4
    with pytest.raises(ObserverError, match="meddle"):
        fit(forward=[meddle], model=Rich(), step_fn=step_fn)


def records(trainer):
    return list(hookline.open_run(trainer.run.path).metrics("activations/*"))


def test_activation_stats_records_mean_and_deviation_at_its_interval(tmp_path):
    outputs = []

    def keep(activations):
        outputs.append(activations.clone())

    trainer = fit(ActivationStats(log_interval=3), forward=[keep], runs=tmp_path)
    found = records(trainer)
    assert [one["name"] for one in found] == ["activations/mean", "activations/std"] * 2
    expected = [
        value
        for tensor in (outputs[0], outputs[3])
        for value in (tensor.mean().item(), tensor.std(correction=0).item())
    ]
    assert [one["value"] for one in found] == pytest.approx(expected, rel=1e-5)
