"""Probes in a trainer: hooks like all others, and on the model only while it trains."""

from __future__ import annotations

import logging

import pytest
import torch
from loops import batches, config, hooks_on, make, same, weights
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import HookFailedError, ObserverError, Trainer
from hookline.probes import Capture, Monitor
from hookline.probes.probe import Probe


class Sees(Probe):
    def __init__(self, modules="*"):
        super().__init__(modules)
        self.calls = []

    def after(self, call):
        self.calls.append((call.step, call.epoch, call.name, call.index))


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


def test_a_failing_probe_is_isolated_and_disabled(caplog):
    class Fails(Probe):
        def after(self, call):
            raise ZeroDivisionError

    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer, hooks=[Fails("first")])
    with caplog.at_level(logging.ERROR, "hookline"):
        trainer.fit(batches(5))
    assert (trainer.status, trainer.step) == ("completed", 5)
    assert trainer.hooks.summary().failures == {"fails": 3}
    assert "DISABLED" in caplog.text


class Meddles(Probe):
    """Doubles what it should only observe, in `how` of several ways."""

    def __init__(self, how):
        super().__init__("first")
        self.how = how

    def before(self, call):
        if self.how == "input":
            call.args[0].mul_(2)

    def after(self, call):
        with torch.no_grad():
            if self.how == "in place":
                call.output.mul_(2)
            elif self.how == "data":
                call.output.data.mul_(2)
            elif self.how == "numpy":
                call.output.detach().numpy()[:] *= 2


@pytest.mark.parametrize("how", ["in place", "data", "numpy", "input"])
def test_an_observing_probe_that_changes_tensors_is_fatal(how):
    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer, hooks=[Meddles(how)])
    with pytest.raises(ObserverError, match="Meddles changed the input or output of 'first'"):
        trainer.fit(batches(2))
    assert hooks_on(model) == 0
    Meddles(how).attach(model)
    with pytest.raises(ObserverError, match="Meddles changed"):
        model(next(iter(batches(1)))[0])
    with hookline.probes.HookManager() as manager:
        manager.register_probe(model.second, "second", Meddles(how))
        with pytest.raises(ObserverError, match="Meddles changed"):
            model.second(torch.ones(1, model.second.in_features))


class Draws(Probe):
    """Uses global random numbers in one of its methods."""

    def __init__(self, where="after"):
        super().__init__("first")
        self.where, self.calls = where, 0

    def draw(self, where):
        if where == self.where:
            self.calls += 1
            torch.rand(3)

    def before(self, call):
        self.draw("before")

    def after(self, call):
        self.draw("after")

    def forward_end(self):
        self.draw("forward_end")


@pytest.mark.parametrize("where", ["before", "after", "forward_end"])
def test_a_probe_that_draws_random_numbers_is_disabled_and_training_is_the_same(where, caplog):
    trained = []
    for hooks in ([], [Draws(where)]):
        model, optimizer = make()
        torch.manual_seed(3)
        trainer = Trainer(config(), model, optimizer, hooks=hooks)
        trainer.fit(batches(4))
        trained.append((weights(model), torch.rand(2)))
    assert same(trained[0][0], trained[1][0])
    assert torch.equal(trained[0][1], trained[1][1])
    assert hooks[0].calls == 1
    [info] = [info for info in trainer.hooks.describe() if info.name == "draws"]
    assert (info.status, info.failures) == ("failed", 1)
    warned = [r for r in caplog.records if "'draws' is DISABLED" in r.getMessage()]
    assert [record.levelno for record in warned] == [logging.WARNING]


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
        edits = enable_intervention = True

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
    edits = enable_intervention = True

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


# -- schedules


def test_a_schedule_of_the_registration_thins_out_calls_and_events_alike():
    class SeesSteps(Sees):
        ends = ()

        def on_step_end(self, step):
            self.ends = (*self.ends, step)

    model, optimizer = make()
    probe = SeesSteps("first")
    trainer = Trainer(config(accumulate=2, max_epochs=2), model, optimizer)
    trainer.add_hook(probe, every=3)
    trainer.fit(batches(7), val_loaders=batches(1))  # 4 steps in each epoch
    assert probe.ends == (3, 6)
    assert [call[:2] for call in probe.calls] == [(2, 0), (2, 0), (5, 1), (5, 1)]


# -- without gradients


class Checkpointed(torch.nn.Module):
    """Its first pass runs without gradients, and is training; also where it is not called."""

    def __init__(self, whole=False):
        super().__init__()
        self.net, self.whole = make()[0], whole

    def forward(self, x):
        if self.whole:
            return self.net(x)
        return checkpoint(self.net, x, use_reentrant=True)


@pytest.mark.parametrize("how", ["inside", "whole", "forward"])
def test_the_first_pass_of_a_reentrant_checkpoint_is_training(how):
    model = Checkpointed(whole=how == "whole")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = Sees("net.first")
    with hookline.attach(model, optimizer, hooks=[probe]):
        for x, y in batches(2):
            x.requires_grad_()
            if how == "whole":
                out = checkpoint(model, x, use_reentrant=True)
            else:
                out = model(x) if how == "inside" else model.forward(x)
            torch.nn.functional.mse_loss(out, y).backward()
            optimizer.step()
    assert [step for step, *_ in probe.calls] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_in_a_compiled_model_too(whole):
    torch.compiler.reset()
    model = Checkpointed(whole=True)  # it is not
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = Sees("net.first")
    with hookline.attach(model, optimizer, hooks=[probe]):
        if whole:
            compiled = torch.compile(model, backend="aot_eager")
        else:
            model.net.compile(backend="aot_eager")
            compiled = model.forward  # the model's own call is not seen
        for x, y in batches(3):
            torch.nn.functional.mse_loss(compiled(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                compiled(x)
    assert [step for step, *_ in probe.calls] == [0, 1, 2]


# -- a model that is not called


class Bypassed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def training_step(self, batch):
        x, y = batch
        for _ in range(2):
            x = self.a(x)
        return torch.nn.functional.mse_loss(self.b.forward(hookline.tap(x, "here")), y)


def test_modules_that_are_not_called_are_named_after_the_first_step(caplog):
    model = Bypassed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hooks = [Monitor("b"), Sees(["a", "b"]), Capture(None, taps="here")]
    told = []

    class Tells(hookline.Hook):
        def on_train_batch_start(self):
            told.append("saw no" in caplog.text)

    trainer = Trainer(
        config(), model, optimizer, step_fn=Bypassed.training_step, hooks=[*hooks, Tells()]
    )
    trainer.fit(batches(3))
    assert told == [False, True, True]
    assert caplog.text.count("saw no call of 'b'") == 2
    assert caplog.text.count("saw no value named 'here'") == 1
    assert "`.forward()` or another method" in caplog.text


# -- failures at the beginning and the end of a forward, and of edits


def test_an_edit_of_one_s_own_needs_the_permission():
    class Zeros(Probe):
        edits = True

        def after(self, call):
            return call.output * 0

    model, optimizer = make()
    with pytest.raises(hookline.ProbeError, match=r"Zeros\.enable_intervention = True"):
        Trainer(config(), model, optimizer, hooks=[Zeros("first")])
    with pytest.raises(hookline.ProbeError, match=r"Zeros\.enable_intervention = True"):
        hookline.attach(model, optimizer, hooks=[Zeros("first")])
    with pytest.raises(hookline.ProbeError, match=r"Zeros\.enable_intervention = True"):
        Zeros("first").attach(model)
    allowed = Zeros("first")
    allowed.enable_intervention = True
    Trainer(config(), model, optimizer, hooks=[allowed]).fit(batches(1))
    assert hooks_on(model) == 0


def test_an_edit_of_one_s_own_that_fails_stops_training():
    class Fails(Halves):
        def after(self, call):
            raise ZeroDivisionError("of mine")

    model, optimizer = make()
    with pytest.raises(HookFailedError, match=r"'fails' failed in after.*of mine"):
        Trainer(config(), model, optimizer, hooks=[Fails("first")]).fit(batches(2))
    assert hooks_on(model) == 0
    assert Fails.critical
    assert Fails.intervenes
