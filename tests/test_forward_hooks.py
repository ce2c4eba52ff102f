"""Forward hooks observe what the model returns, and cannot change training without being named."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass

import numpy
import pytest
import torch
from loops import Net, batches, config, fit, make, recorder, same, weights

import hookline
from hookline import ForwardHook, HookFailedError, ObserverError, Trainer
from hookline.hooks.monitoring.activation_stats import ActivationStats


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


def test_a_plain_function_is_one_with_its_kind():
    seen = []

    def look(activations):
        seen.append(activations.mean().item())

    trainer = fit(forward=[look])
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


def test_a_change_in_place_is_noticed_also_when_the_hook_fails_after_it():
    def meddle(activations):
        activations.zero_()
        raise RuntimeError("and then this")

    with pytest.raises(ObserverError, match="meddle"):
        fit(forward=[meddle])


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(3),
        random.random,
        lambda: random.shuffle([1, 2, 3]),
        numpy.random.rand,
        lambda: numpy.random.permutation(3),
    ],
)
def test_drawing_trainings_random_numbers_is_fatal_and_a_generator_of_its_own_is_fine(draw):
    def draws(activations):
        draw()

    def draws_its_own(activations):
        torch.randn(3, generator=torch.Generator().manual_seed(0))
        random.Random(0).random()
        numpy.random.default_rng(0).random()

    with pytest.raises(ObserverError, match="draws used a global random number generator"):
        fit(forward=[draws])
    plain, observed = fit(), fit(forward=[draws_its_own])
    assert same(weights(plain.model), weights(observed.model))


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
    trainer = fit(forward=[lambda activations: activations * 2])
    assert "but what an observer returns is not used" in caplog.text
    assert trainer.status == "completed"


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


class Plain:
    """What a model may return besides: no dataclass, no mapping."""

    def __init__(self, logits, hidden):
        self.logits, self.hidden = logits, [hidden]


class ReturnsAnObject(Net):
    def forward(self, x):
        hidden = self.first(x)
        return Plain(self.second(torch.relu(hidden)), hidden)


def test_tensors_in_any_object_are_detached_and_watched():
    seen = []

    def look(activations):
        seen.append((type(activations), activations.hidden[0].requires_grad))
        activations.logits = None  # its own object, not the model's

    def meddle(activations):
        activations.hidden[0].add_(1)

    def step_fn(model, batch):
        return model(batch[0]).logits.square().mean()

    fit(forward=[look], model=ReturnsAnObject(), step_fn=step_fn)
    assert seen == [(Plain, False)] * 4
    with pytest.raises(ObserverError, match="meddle"):
        fit(forward=[meddle], model=ReturnsAnObject(), step_fn=step_fn)


def test_it_does_not_see_validation():
    seen = []
    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer)
    trainer.add_hook(lambda activations: seen.append(1), kind="forward")
    trainer.fit(batches(2), val_loaders=batches(3))
    assert len(seen) == 2


def records(trainer):
    lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["name"].startswith("activations")]


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


def test_activation_stats_takes_mappings_and_bf16(tmp_path):
    class Mapped(Net):
        def forward(self, x):
            out = super().forward(x)
            waves = {"waves": (torch.complex(torch.ones(2), torch.full((2,), 3.0)),)}
            return {"logits": out.bfloat16(), "count": torch.tensor(3), "loss": out.mean()} | {
                "more": waves
            }

    trainer = fit(
        ActivationStats(log_interval=4),
        model=Mapped(),
        runs=tmp_path,
        step_fn=lambda model, batch: model(batch[0])["loss"],
    )
    values = {one["name"]: one["value"] for one in records(trainer)}
    kept = ("logits", "loss", "more/waves/0")
    assert set(values) == {f"activations/{k}/{s}" for k in kept for s in ("mean", "std")}
    assert values["activations/more/waves/0/mean"] == 2.0


def test_the_loop_still_calls_other_hooks_in_order():
    hook = recorder("on_before_forward", "on_after_forward")
    fit(hook, forward=[lambda activations: None])
    assert hook.told == ["on_before_forward", "on_after_forward"] * 4


def test_a_class_without_a_call_fails_with_its_name(caplog):
    class Empty(ForwardHook):
        pass

    fit(Empty())
    assert "Empty has no __call__(self, activations)" in caplog.text


def test_an_observer_error_is_a_hook_failed_error():
    assert issubclass(ObserverError, HookFailedError)
