"""Several models and optimizers with names, as in a GAN."""

from __future__ import annotations

import json

import pytest
import torch
from loops import make, recorder, same, told_in, weights
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import LoopError


class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, noise):
        return self.main(noise)


def make_gan():
    torch.manual_seed(0)
    models = {
        "generator": Maker(),
        "discriminator": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)),
    }
    rates = {"generator": 0.01, "discriminator": 0.02}
    return models, {n: torch.optim.Adam(m.parameters(), lr=rates[n]) for n, m in models.items()}


def train_gan(models, optimizers, steps=3):
    """Two backwards for the discriminator, one for the generator; return their mean losses."""
    torch.manual_seed(1)
    losses = []
    generator, discriminator = models["generator"], models["discriminator"]
    for _ in range(steps):
        discriminator.zero_grad()
        judge = lambda x, target: F.binary_cross_entropy_with_logits(  # noqa: E731
            discriminator(x), torch.full((5, 1), target)
        )
        real = judge(torch.randn(5, 4), 1.0)
        real.backward()
        fake_samples = generator(torch.randn(5, 3))
        fake = judge(fake_samples.detach(), 0.0)
        fake.backward()
        optimizers["discriminator"].step()
        generator.zero_grad()
        fooled = judge(fake_samples, 1.0)
        fooled.backward()
        optimizers["generator"].step()
        losses.append(((real.item() + fake.item()) / 2, fooled.item()))
    return losses


def records(session, name):
    lines = (session.run.path / "metrics.jsonl").read_text().splitlines()
    found = (json.loads(line) for line in lines)
    return [(r["step"], r["value"]) for r in found if r["name"] == name]


def test_losses_and_rates_of_named_optimizers_are_recorded_apart(tmp_path, caplog):
    plain, its_optimizers = make_gan()
    losses = train_gan(plain, its_optimizers)
    models, optimizers = make_gan()
    hook = recorder(on_epoch_end=("metrics",), on_step_end=("model", "optimizers"))
    with (
        hookline.attach(models, optimizers, hooks=[hook], runs=tmp_path) as session,
        session.epoch(),
    ):
        assert train_gan(models, optimizers) == losses
    for name in models:
        assert same(weights(models[name]), weights(plain[name]))
    expected = {"discriminator": [d for d, _ in losses], "generator": [g for _, g in losses]}
    for name, values in expected.items():
        found = records(session, f"train/loss/{name}")
        assert [step for step, _ in found] == [1, 2, 3]
        assert [value for _, value in found] == pytest.approx(values)
        rate = optimizers[name].param_groups[0]["lr"]
        assert records(session, f"lr/{name}") == [(step, rate) for step in (1, 2, 3)]
    assert records(session, "train/loss") == []
    metrics = told_in(hook, "on_epoch_end")[0]["metrics"]
    assert metrics["train/loss/generator"] == pytest.approx(sum(expected["generator"]) / 3)
    assert "train/loss" not in metrics
    assert "has no train/loss" not in caplog.text
    manifest = json.loads((session.run.path / "manifest.json").read_text())
    assert "generator.main.2.weight" in manifest["parameter_names"]


def test_a_hook_that_asks_for_a_loss_of_several_named_optimizers_is_refused():
    models, optimizers = make_gan()
    before = [weights(model) for model in models.values()]
    hook = recorder(on_step_end=("loss",))
    with (
        pytest.raises(hookline.NotProvidedError, match=r"on_step_end\) asks for 'loss'. Each of"),
        hookline.attach(models, optimizers, hooks=[hook]),
    ):
        train_gan(models, optimizers)
    assert all(map(same, map(weights, models.values()), before))


def test_a_hook_that_works_without_the_loss_gets_none_of_several_named_optimizers():
    models, optimizers = make_gan()
    seen = []

    class Optional(hookline.Hook):
        def on_step_end(self, step, state, loss=None):
            seen.append((step, loss, "latest_loss" in state, "avg_loss" in state))

    with hookline.attach(models, optimizers, hooks=[Optional()]):
        train_gan(models, optimizers, steps=2)
    assert seen == [(1, None, False, False), (2, None, False, False)]


def test_a_single_named_model_has_a_loss():
    models, optimizers = make_gan()
    hook = recorder(on_step_end=("loss",))
    only = {"discriminator": models["discriminator"]}
    with hookline.attach(only, {"only": optimizers["discriminator"]}, hooks=[hook]):
        loss = models["discriminator"](torch.ones(2, 4)).mean()
        loss.backward()
        optimizers["discriminator"].step()
    assert told_in(hook, "on_step_end") == [{"loss": loss.item()}]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_rate_monitor_uses_the_names_of_optimizers_and_logs_each_rate_once(groups, tmp_path):
    models, optimizers = make_gan()
    if groups == 2:
        optimizers["generator"].add_param_group({"params": [torch.ones(1)], "lr": 0.5})
    monitor = hookline.LRMonitor(log_momentum=True)
    with hookline.attach(models, optimizers, hooks=[monitor], runs=tmp_path) as session:
        train_gan(models, optimizers, steps=2)
    assert records(session, "lr/discriminator") == [(1, 0.02), (2, 0.02)]
    assert records(session, "momentum/discriminator") == [(1, 0.9), (2, 0.9)]
    if groups == 1:
        assert records(session, "lr/generator") == [(1, 0.01), (2, 0.01)]
    else:
        assert records(session, "lr/generator") == []
        assert records(session, "lr/generator/group_1") == [(1, 0.5), (2, 0.5)]
    assert records(session, "lr/Adam") == []


def test_parameters_have_the_names_of_their_models():
    models, optimizers = make_gan()
    names = []

    class Update(hookline.UpdateHook):
        def __call__(self, gradients):
            names.append(sorted(gradients))
            return gradients

    with hookline.attach(models, optimizers, hooks=[Update()]) as session:
        train_gan(models, optimizers, steps=1)
        assert session.model.generator is session.model["generator"] is models["generator"]
        assert session.model[1] is models["discriminator"]
    assert [name.rsplit(".", 1)[0] for name in names[0]] == ["discriminator.0"] * 2 + [
        "discriminator.1"
    ] * 2
    assert "generator.main.0.weight" in names[1]


def test_a_checkpoint_has_the_weights_under_these_names(tmp_path):
    models, optimizers = make_gan()
    with hookline.attach(models, optimizers) as session:
        train_gan(models, optimizers)
        session.save_checkpoint(tmp_path / "saved", wait=True)
    others, its_optimizers = make_gan()
    hookline.attach(others, its_optimizers).load_checkpoint(tmp_path / "saved")
    for name in models:
        assert same(weights(models[name]), weights(others[name]))
    renamed = {"a": others["generator"], "b": others["discriminator"]}
    with pytest.raises(hookline.CheckpointError, match="generator"):
        hookline.attach(renamed, its_optimizers).load_checkpoint(tmp_path / "saved")


def test_optimizers_of_one_model_with_a_loss_for_all_share_it(tmp_path):
    model, _ = make()
    optimizers = {
        "first": torch.optim.SGD(model.first.parameters(), lr=0.1),
        "second": torch.optim.Adam(model.second.parameters(), lr=0.01),
    }
    with hookline.attach(model, optimizers, runs=tmp_path) as session:
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
    assert records(session, "train/loss") == [(1, loss.item())]
    assert records(session, "train/loss/first") == []
    assert records(session, "lr/second") == [(1, 0.01)]


def test_lists_have_one_loss_as_before(tmp_path):
    models, optimizers = make_gan()
    given = list(models.values()), list(optimizers.values())
    with hookline.attach(*given, runs=tmp_path) as session:
        losses = train_gan(models, optimizers, steps=1)
    ((_, mean),) = records(session, "train/loss")
    assert mean == pytest.approx((2 * losses[0][0] + losses[0][1]) / 3)


@pytest.mark.parametrize(
    ("models", "optimizers", "message"),
    [
        ({"a.b": nn.Linear(2, 2)}, None, "names that a module may have"),
        ({"a": 3}, None, "takes torch.nn.Modules"),
        ({}, None, "expected one or several torch.nn.Modules"),
        (None, {1: torch.optim.SGD([torch.ones(1)])}, "name: optimizer"),
    ],
)
def test_names_are_checked(models, optimizers, message):
    with pytest.raises((TypeError, LoopError), match=message):
        hookline.attach(nn.Linear(2, 2) if models is None else models, optimizers)
