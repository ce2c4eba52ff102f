"""EMA: the average itself, validation with it, and training that does not notice."""

from __future__ import annotations

import json

import loops
import pytest
import torch
from loops import Net, batches, make, same, weights
from torch import nn
from torch.nn import functional as F

import hookline
import hookline.hook
from hookline import (
    HookFailedError,
    Trainer,
)
from hookline.checkpoint import find_checkpoint, load_checkpoint
from hookline.hooks.checkpointing.checkpoint_hook import CheckpointHook
from hookline.hooks.optimization import ema


class EMA(ema.EMA):
    """Updated in every step, unless a test says otherwise."""

    def __init__(self, decay=0.999, warmup=True, every_n_steps=1, **options):
        super().__init__(decay, warmup, every_n_steps, **options)


class Follow(hookline.Hook):
    """Notes the weights after each step."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, model, ctx):
        if not ctx.skipped:
            self.weights.append(weights(model))


def fit(tmp_path, *hooks, model=None, n=4, **options) -> Trainer:
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options = {"runs": tmp_path / "runs", "max_epochs": 2, "val": batches(2, seed=2)} | options
    return loops.fit(*hooks, model=model, optimizers=optimizer, data=batches(n), **options)


def expected(start, seen, decay, warmup=0):
    """The average, written down plainly."""
    average = [w.clone() for w in start]
    for n, now in enumerate(seen):
        d = min(decay, (1 + n) / (warmup + n)) if warmup else decay
        average = [torch.lerp(a, w, 1 - d) for a, w in zip(average, now, strict=True)]
    return average


def averages(hook: EMA) -> list[torch.Tensor]:
    return list(hook.state_dict()["averages"].values())


def losses(trainer: Trainer, name: str) -> list[float]:
    lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    return [r["value"] for r in map(json.loads, lines) if r["name"] == name]


def start() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return weights(Net())


# -- the average ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup", "w"), [(True, 10), (3, 3), (False, 0)])
def test_warmup_forgets_the_initial_weights_sooner(tmp_path, warmup, w):
    hook, follow = EMA(0.9, warmup=warmup), Follow()
    fit(tmp_path, follow, hook)
    assert same(averages(hook), expected(start(), follow.weights, 0.9, w))


def test_every_n_steps(tmp_path):
    hook, follow = EMA(0.5, warmup=False, every_n_steps=3), Follow()
    fit(tmp_path, follow, hook)
    assert hook.updates == 4
    after_three = expected(start(), follow.weights[:3], 0.5)
    assert same(averages(hook), expected(after_three, follow.weights[5::3], 0.5**3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_averaged_in_float32(dtype):
    model = nn.Linear(2, 2, bias=False).to(dtype)
    hook = EMA(0.999, warmup=False)
    hook.on_train_start(model)
    before = model.weight.detach().float().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    for _ in range(3):
        hook.on_after_optimizer_step()
        hook.on_step_end()
    (average,) = averages(hook)
    assert average.dtype == torch.float32
    target = model.weight.detach().float()
    torch.testing.assert_close(average, target + (before - target) * 0.999**3)
    hook.on_validation_start()
    assert torch.equal(model.weight, average.to(dtype))
    hook.on_validation_end()
    assert torch.equal(model.weight.float(), target)
    assert hook.averaged_state_dict()["weight"].dtype == dtype


class Tied(nn.Module):
    """An embedding that is also the output; one layer is frozen, and there are statistics."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(8, 4, bias=False)
        self.second = nn.Linear(8, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.norm(self.frozen(self.inner(x)))
        return self.first(x) + self.second(torch.relu(x))


def tied() -> Tied:
    torch.manual_seed(1)
    return Tied()


def test_tied_weights_are_averaged_once_and_frozen_ones_not(tmp_path):
    hook = EMA()
    fit(tmp_path, hook, model=tied())
    names = set(hook.state_dict()["averages"])
    assert names == {"inner.weight", "norm.weight", "norm.bias", "first.weight"}


def test_a_layer_that_thaws_is_averaged_from_then_on(tmp_path):
    class Thaws(hookline.Hook):
        def on_epoch_start(self, model, epoch):
            if epoch == 1:
                model.frozen.weight.requires_grad_(True)

    model, hook, follow = tied(), EMA(0.5, warmup=False), Follow()
    frozen = model.frozen.weight.detach().clone()
    fit(tmp_path, follow, Thaws(), hook, model=model)
    at = [name for name, _ in model.named_parameters()].index("frozen.weight")
    seen = [[w[at]] for w in follow.weights]
    assert torch.equal(
        hook.state_dict()["averages"]["frozen.weight"], expected([frozen], seen, 0.5)[0]
    )


# -- validation -----------------------------------------------------------------------------------


class Look(hookline.Hook):
    """Notes the weights in every event of validation."""

    def __init__(self):
        self.seen = {}

    def on_validation_start(self, model):
        self.seen["start"] = weights(model)

    def on_validation_batch_end(self, model):
        self.seen["batch"] = weights(model)

    def on_validation_end(self, model):
        self.seen["end"] = weights(model)


@pytest.mark.parametrize("validate_with", [True, False])
def test_validation_sees_the_average_and_training_never_does(tmp_path, validate_with):
    look, hook = Look(), EMA(0.9, validate_with=validate_with)
    trainer = fit(tmp_path, look, hook)
    own = weights(trainer.model)
    average = [w for _, w in hook.state_dict()["averages"].items()]
    assert not same(own, average)
    assert same(look.seen["batch"], average if validate_with else own)
    # Users' hooks come first: before it at the start, and before it at the end.
    assert same(look.seen["start"], own)
    assert same(look.seen["end"], average if validate_with else own)
    with torch.no_grad():
        model = Net().eval()
        if validate_with:
            hook.apply_to(model)
        else:
            model.load_state_dict(trainer.model.state_dict())
        loss = sum(F.mse_loss(model(x), y).item() for x, y in batches(2, seed=2)) / 2
    assert losses(trainer, "val/loss")[-1] == pytest.approx(loss, abs=1e-6)


def test_training_is_bit_for_bit_the_same_with_it(tmp_path):
    with_it = fit(tmp_path / "a", EMA(0.9), validate_every_steps=1, sanity=True)
    without = fit(tmp_path / "b", validate_every_steps=1, sanity=True)
    assert same(weights(with_it.model), weights(without.model))
    assert losses(with_it, "train/loss") == losses(without, "train/loss")
    assert losses(with_it, "val/loss") != losses(without, "val/loss")


def test_the_weights_come_back_when_validation_fails(tmp_path):
    class Fails(hookline.Hook):
        critical = True

        def on_validation_batch_end(self):
            raise RuntimeError("no")

    class Told(hookline.Hook):
        hookline_group = hookline.hook.HookGroup.WRITER

        def on_exception(self, model):
            self.seen = weights(model)

    follow, told = Follow(), Told()
    torch.manual_seed(0)
    model = Net()
    with pytest.raises(HookFailedError):
        fit(tmp_path, follow, Fails(), told, EMA(0.9), model=model)
    assert same(weights(model), follow.weights[-1])
    assert same(told.seen, follow.weights[-1])
    assert not model._state_dict_hooks


def test_a_bare_loop_that_goes_on_after_a_failed_validation_trains_its_own_weights(caplog):
    model, optimizer = make()
    hook = EMA(0.9)
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for i, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if i == 2:
                before = hook._training_weights
                assert before is not None
            optimizer.step()
            if i == 1:
                own = weights(model)
                with pytest.raises(ZeroDivisionError), session.validation():
                    assert not same(weights(model), own)
                    raise ZeroDivisionError
    assert same(list(before.values()), own)
    grads = [p.grad for p in model.parameters()]
    stepped = [w - 0.1 * g for w, g in zip(own, grads, strict=True)]
    for a, b in zip(weights(model), stepped, strict=True):
        torch.testing.assert_close(a, b)
    assert "A validation did not end" in caplog.text


def test_the_model_is_never_saved_with_the_average_in_it(tmp_path):
    class Saves(hookline.Hook):
        def on_validation_batch_end(self, trainer):
            self.state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
            trainer.save_checkpoint(tmp_path / "now")

    saves, model = Saves(), tied()
    trainer = fit(tmp_path, saves, EMA(0.5), model=model, max_epochs=1)
    own = trainer.model.state_dict()
    saved = load_checkpoint(tmp_path / "now").model
    assert own.keys() == saved.keys() == saves.state.keys()
    for name, weight in own.items():
        assert torch.equal(saved[name], weight), name
        assert torch.equal(saves.state[name], weight), name
    # Outside of a step a checkpoint is saved at once.
    own = {k: v.clone() for k, v in own.items()}
    trainer.validate()
    saved = load_checkpoint(tmp_path / "now_2").model
    for name, weight in own.items():
        assert torch.equal(saved[name], weight), name


# -- saving, resuming, exporting ------------------------------------------------------------------


def test_a_resumed_run_has_the_same_average_bit_for_bit(tmp_path):
    whole, hook = EMA(0.9, every_n_steps=3), EMA(0.9, every_n_steps=3)
    long = fit(tmp_path / "whole", whole, max_epochs=4)
    first = fit(tmp_path, EMA(0.9, every_n_steps=3), CheckpointHook(), max_epochs=2)
    saved = load_checkpoint(find_checkpoint(first.run.path)).state["hooks"]["ema"]
    assert saved["updates"] == 4  # after steps 1, 2, 3 and 6
    again = fit(tmp_path, hook, CheckpointHook(), max_epochs=4, resume_from=first.run.path)
    assert same(averages(hook), averages(whole))
    assert same(weights(again.model), weights(long.model))
    assert hook.updates == whole.updates == 7


def test_a_state_of_another_model_is_refused(tmp_path):
    first = fit(tmp_path, EMA(), CheckpointHook(), max_epochs=1)
    state = load_checkpoint(find_checkpoint(first.run.path)).state["hooks"]["ema"]
    hook = EMA()
    hook.load_state_dict(state)
    refused = pytest.raises(hookline.TrainingError, match="which the model does not have, or in")
    with refused:
        hook.on_train_start(tied())
    other = Net()
    other.first = nn.Linear(8, 4)
    hook.load_state_dict(state)
    with refused:
        hook.on_train_start(other)


def test_the_average_is_applied_to_another_model_and_tied_weights_stay_one(tmp_path):
    model, hook = tied(), EMA(0.9)
    fit(tmp_path, hook, model=model)
    other = Tied()
    hook.apply_to(other)
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, hook.averaged_state_dict()[name]), name
    own = weights(model)
    with torch.no_grad():
        other.first.weight.zero_()  # a copy: nothing is shared
    assert same(weights(model), own)
    assert averages(hook)[-1].abs().sum() > 0


def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = Net()
    hook = EMA()
    hook.on_train_start(torch.compile(model))
    assert set(hook.state_dict()["averages"]) == set(dict(model.named_parameters()))
    hook.apply_to(torch.compile(Net()))
    hook.on_train_end()
