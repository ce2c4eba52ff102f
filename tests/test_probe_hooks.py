"""Probes in a trainer: hooks like all others, and on the model only while it trains."""

from __future__ import annotations

import logging

import pytest
import torch
from loops import batches, make, same, weights

import hookline
from hookline import HookFailedError, Trainer, TrainerConfig
from hookline.probes.probe import Probe


class Sees(Probe):
    def __init__(self, modules="*"):
        super().__init__(modules)
        self.calls = []

    def after(self, call):
        self.calls.append((call.step, call.epoch, call.name, call.index))


def config(**fields):
    return TrainerConfig(**{"runs": None, "progress": "off", "seed": 1, **fields})


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_probe_sees_the_calls_of_training_with_step_and_epoch_and_is_off_the_model_after_it():
    model, optimizer = make()
    probe = Sees("first")
    trainer = Trainer(config(max_epochs=2, accumulate=2), model, optimizer, hooks=[probe])
    assert hooks_on(model) == 0
    trainer.fit(batches(4), val_loaders=batches(3))
    steps = [(0, 0), (0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (3, 1)]
    assert probe.calls == [(*one, "first", 0) for one in steps]  # and none of validation's
    assert hooks_on(model) == 0
    info = trainer.hooks.describe()[0]
    assert (info.name, info.kind, info.calls, info.failures) == ("sees", "probe", 8, 0)
    assert info.seconds > 0


def test_it_is_toggled_by_name_and_removed_also_while_training():
    model, optimizer = make()
    probe, on_model = Sees("first"), []

    class Toggles(hookline.Hook):
        def on_step_end(self, trainer, step):
            if step == 1:
                trainer.disable_hook("sees")
            if step == 2:
                trainer.enable_hook("sees")
            if step == 3:
                trainer.remove_hook("sees")
            on_model.append(hooks_on(model) > 0)

    Trainer(config(), model, optimizer, hooks=[probe, Toggles()]).fit(batches(5))
    assert [step for step, *_ in probe.calls] == [0, 2]
    assert on_model == [False, True, False, False, False]


def test_training_is_bit_for_bit_the_same_with_a_probe():
    plain, probed = make(), make()
    Trainer(config(), *plain).fit(batches(4))
    Trainer(config(), *probed, hooks=[Sees("*")]).fit(batches(4))
    assert same(weights(plain[0]), weights(probed[0]))


def test_a_failing_probe_is_isolated_and_quarantined(caplog):
    class Fails(Probe):
        def after(self, call):
            raise ZeroDivisionError

    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer, hooks=[Fails("first")])
    with caplog.at_level(logging.ERROR, "hookline"):
        trainer.fit(batches(5))
    assert (trainer.status, trainer.step) == ("completed", 5)
    assert trainer.hooks.summary().failures == {"fails": 3}
    assert "QUARANTINED" in caplog.text


def test_a_strict_probe_that_fails_stops_training():
    class Fails(Probe):
        def after(self, call):
            raise ZeroDivisionError

    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer)
    trainer.add_hook(Fails("first"), strict=True)
    with pytest.raises(HookFailedError, match="'fails'"):
        trainer.fit(batches(2))
    assert hooks_on(model) == 0


def test_a_module_that_is_not_there_is_said_when_the_probe_is_added():
    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer)
    with pytest.raises(hookline.HooklineError, match="frist"):
        trainer.add_hook(Sees("frist"))
    assert "sees" not in trainer.hooks.list_hooks()


def test_a_probe_that_returns_a_value_without_permission_is_an_error():
    class Meddles(Probe):
        def after(self, call):
            return call.output * 2

    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer, hooks=[Meddles("first")])
    with pytest.raises(hookline.ProbeError, match="'meddles' returned a value for 'first'"):
        trainer.fit(batches(1))


def test_it_is_listed_in_the_manifest(tmp_path):
    model, optimizer = make()
    trainer = Trainer(config(runs=tmp_path), model, optimizer, hooks=[Sees("first")])
    trainer.fit(batches(1))
    kinds = {hook["name"]: hook["kind"] for hook in trainer.run.manifest["hooks"]}
    assert kinds["sees"] == "probe"


def test_a_probe_that_is_interrupted_leaves_the_model_clean():
    class Stops(hookline.Hook):
        def on_step_end(self):
            raise KeyboardInterrupt

    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer, hooks=[Sees(), Stops()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(2))
    assert hooks_on(model) == 0


def test_an_edit_acts_in_validation_too_and_ends_with_training():
    class Doubles(Probe):
        edits = True
        intervenes = True

        def after(self, call):
            return call.output * 2

    class Keeps(hookline.Hook):
        def on_validation_end(self, metrics):
            self.loss = float(metrics["val/loss"])

    model, optimizer = make()
    keeps = Keeps()
    trainer = Trainer(config(), model, optimizer, hooks=[Doubles("second"), keeps])
    trainer.fit(batches(1), val_loaders=batches(2))
    edited, plain = keeps.loss, float(trainer.validate(batches(2))["val/loss"])
    model.eval()
    with torch.no_grad():
        outputs = [(model(x), y) for x, y in batches(2)]
    losses = [[torch.nn.functional.mse_loss(k * o, y).item() for o, y in outputs] for k in (1, 2)]
    assert [plain, edited] == pytest.approx([sum(one) / 2 for one in losses])


def test_in_a_bare_loop_a_probe_is_on_the_model_until_the_session_ends():
    model, optimizer = make()
    probe = Sees("first")
    with hookline.attach(model, optimizer, hooks=[probe]) as session:
        for x, y in batches(3):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if session.step == 2:
                session.disable_hook("sees")
    assert probe.calls == [(0, None, "first", 0), (1, None, "first", 0)]
    assert hooks_on(model) == 0


class Halves(Probe):
    edits = True
    intervenes = True

    def after(self, call):
        return call.output / 2


@pytest.mark.parametrize("change", ["disable_hook", "remove_hook"])
def test_an_edit_that_is_toggled_within_a_step_is_on_until_its_end(change):
    model, optimizer = make()
    on_model = []

    class Toggles(hookline.Hook):
        def on_before_backward(self, trainer, step):
            if step == 1:
                getattr(trainer, change)("halves")  # a recomputation would still need it
            on_model.append(hooks_on(model) > 0)

        def on_train_batch_end(self, trainer, step):
            on_model.append(hooks_on(model) > 0)

        def on_train_batch_start(self, step):
            on_model.append(hooks_on(model) > 0)

    Trainer(config(), model, optimizer, hooks=[Halves("first"), Toggles()]).fit(batches(3))
    assert on_model == [True] * 3 + [True] * 3 + [False] * 3


def test_an_edit_that_comes_within_a_step_acts_from_the_next_one():
    model, optimizer = make()
    on_model = []

    class Adds(hookline.Hook):
        def on_after_forward(self, trainer, step):
            if step == 1:
                trainer.add_hook(Halves("first"))

        def on_after_backward(self):
            on_model.append(hooks_on(model) > 2)  # two are there for on_after_forward

    Trainer(config(), model, optimizer, hooks=[Adds()]).fit(batches(4))
    assert on_model == [False, False, True, True]


def test_in_a_bare_loop_an_edit_waits_for_the_end_of_the_step_too():
    model, optimizer = make()
    on_model = []
    with hookline.attach(model, optimizer, hooks=[Halves("first")]) as session:
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            if session.step == 1:
                session.disable_hook("halves")
            on_model.append(hooks_on(model) > 0)
            loss.backward()
            optimizer.step()
    assert on_model == [True, True, False]
