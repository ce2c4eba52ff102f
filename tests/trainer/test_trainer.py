"""The trainer's loop: what it trains, in which order hooks are told, and how it ends."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from loops import (
    ALL_EVENTS,
    Net,
    batches,
    config,
    fit,
    make,
    recorder,
    same,
    told_in,
    train,
    weights,
)
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import (
    GenericTrainer,
    HooksConfig,
    Trainer,
    TrainingError,
    get_trainer,
)
from hookline.events import LOOP_MAP


def names(hook):
    return [told if isinstance(told, str) else told[0] for told in hook.told]


# -- the loop -------------------------------------------------------------------------------------


def test_training_is_bit_for_bit_the_loop_one_would_write():
    plain, optimizer = make()
    losses = train(plain, optimizer, batches(12))
    hook = recorder(*ALL_EVENTS, on_step_end=("loss", "grad_norm", "ctx", "state"))
    model, optimizer = make()
    fit(hook, model=model, optimizers=optimizer, data=batches(12))
    assert [float(a["loss"]) for a in told_in(hook, "on_step_end")] == losses
    assert same(weights(model), weights(plain))


def test_events_come_in_the_order_of_the_loop_map():
    hook = recorder(*ALL_EVENTS)
    fit(hook, data=batches(1), val=batches(1), clip_norm=1.0)
    in_map = re.findall(r"\bon_\w+", LOOP_MAP)
    batch_events = {"on_validation_batch_start", "on_validation_batch_end"}  # "batches" in the map
    not_here = {"on_step_skipped", "on_exception"}
    assert [e for e in names(hook) if e not in batch_events] == [
        event for event in in_map if event not in not_here
    ]


def test_epochs_batches_and_steps_are_counted():
    hook = recorder(
        on_epoch_start=("epoch",),
        on_train_batch_end=("epoch", "batch_idx", "dataloader_idx", "dataloader_name"),
        on_step_end=("step",),
    )
    trainer = fit(hook, data=batches(3), max_epochs=2)
    assert [a["epoch"] for a in told_in(hook, "on_epoch_start")] == [0, 1]
    ends = told_in(hook, "on_train_batch_end")
    assert [(a["epoch"], a["batch_idx"]) for a in ends] == [
        (e, i) for e in (0, 1) for i in range(3)
    ]
    assert {(a["dataloader_idx"], a["dataloader_name"]) for a in ends} == {(0, "train")}
    assert [a["step"] for a in told_in(hook, "on_step_end")] == [1, 2, 3, 4, 5, 6]
    assert (trainer.step, trainer.status) == (6, "completed")


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, 4),
        ({"max_steps": 7}, 7),
        ({"max_steps": 7, "max_epochs": 1}, 4),
        ({"max_steps": 0}, 0),
        ({"max_steps": 3, "max_epochs": None}, 3),
    ],
)
def test_training_ends_after_epochs_or_steps(fields, steps):
    hook = recorder("on_train_start", "on_train_end")
    trainer = fit(hook, **fields)
    assert trainer.step == steps
    assert names(hook) == ["on_train_start", "on_train_end"]
    assert trainer.status == "completed"


def test_a_hook_may_stop_training_from_anywhere():
    class Stops(hookline.Hook):
        def on_after_backward(self, trainer, step):
            if step == 1:
                trainer.stop("enough")

    hook = recorder("on_step_end", "on_epoch_end", on_train_end=("status",))
    trainer = fit(Stops(), hook, max_epochs=5)
    assert (trainer.step, trainer.status) == (2, "stopped")
    assert names(hook)[-2:] == ["on_epoch_end", "on_train_end"]


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError, "error"), (KeyboardInterrupt, "interrupted")]
)
def test_an_exception_is_told_and_goes_on(error, status):
    def broken(model, batch):
        raise error("my step")

    hook = recorder("on_exception", on_train_end=("status",))
    with pytest.raises(error, match="my step"):
        fit(hook, step_fn=broken)
    assert hook.told == ["on_exception", ("on_train_end", {"status": status})]


def test_a_second_fit_is_a_new_run():
    model, optimizer = make()
    hook = recorder(on_step_end=("step", "epoch"))
    trainer = Trainer(config(max_epochs=2), model, optimizer, hooks=[hook])
    trainer.fit(batches(2))
    trainer.fit(batches(2))
    numbers = [(a["epoch"], a["step"]) for a in told_in(hook, "on_step_end")]
    assert numbers == [(0, 1), (0, 2), (1, 3), (1, 4)] * 2


def test_a_skipped_step_is_not_made_up_for_by_the_gradients_of_the_next():
    class SkipsFirst(hookline.Hook):
        def on_before_optimizer_step(self, trainer, batch_idx=None):
            if trainer.step == 0 and not getattr(trainer, "skipped_one", False):
                trainer.skipped_one = True
                trainer.skip_optimizer_step()

    hook = recorder(on_step_skipped=("reason",))
    model, optimizer = make()
    trainer = fit(SkipsFirst(), hook, model=model, optimizers=optimizer, data=batches(2))
    assert told_in(hook, "on_step_skipped") == [{"reason": "a hook asked"}]
    assert trainer.step == 1
    plain, plain_optimizer = make()
    x, _ = batches(2)[0]
    plain(x)  # the skipped batch drew its dropout, too
    train(plain, plain_optimizer, batches(2)[1:])
    assert same(weights(model), weights(plain))


def test_training_step_by_hand():
    hook = recorder(
        "on_train_start", "on_epoch_start", "on_step_end", "on_epoch_end", "on_train_end"
    )
    model, optimizer = make()
    trainer = Trainer(config(accumulate=2), model, optimizer, hooks=[hook])
    plain, _ = make()
    torch.manual_seed(3)
    losses = [float(trainer.training_step(batch)) for batch in batches(5)]
    assert trainer.step == 2
    torch.manual_seed(3)
    x, y = batches(1)[0]
    assert losses[0] == F.mse_loss(plain(x), y).item()
    trainer.finish()
    assert (trainer.step, trainer.status) == (3, "completed")
    steps = ["on_step_end"] * 3
    assert hook.told == ["on_train_start", "on_epoch_start", *steps, "on_epoch_end", "on_train_end"]


# -- the loss -------------------------------------------------------------------------------------


def test_the_loss_by_function_by_step_and_by_the_model():
    hook = recorder(on_train_batch_end=("loss", "metrics"))
    fit(hook, loss_fn=lambda outputs, targets: (outputs - targets).abs().mean())
    by_function = float(told_in(hook, "on_train_batch_end")[0]["loss"])

    hook = recorder(on_train_batch_end=("loss", "metrics"))

    def step(model, batch):
        return {"loss": F.l1_loss(model(batch[0]), batch[1]), "size": len(batch[0])}

    fit(hook, step_fn=step)
    told = told_in(hook, "on_train_batch_end")[0]
    assert float(told["loss"]) == pytest.approx(by_function)
    assert told["metrics"] == {"loss": float(told["loss"]), "size": 4}

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def forward(self, x, labels):
            return {"loss": F.l1_loss(self.net(x), labels)}

    model = Own()
    hook = recorder(on_train_batch_end=("loss",))
    data = [{"x": x, "labels": y} for x, y in batches(2)]
    fit(hook, model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), data=data)
    assert len(hook.told) == 2


@pytest.mark.parametrize("whole", [True, False])
def test_the_default_loss_depends_on_the_targets_and_is_said_once(whole, caplog):
    caplog.set_level(logging.INFO)
    data = [(x, torch.randint(0, 4, (4,)) if whole else y) for x, y in batches(3)]
    hook = recorder(on_after_forward=("outputs",), on_train_batch_end=("loss",))
    fit(hook, data=data)
    outputs = told_in(hook, "on_after_forward")[0]["outputs"]
    expected = (F.cross_entropy if whole else F.mse_loss)(outputs, data[0][1])
    assert float(told_in(hook, "on_train_batch_end")[0]["loss"]) == expected.item()
    assert caplog.text.count("No loss function was given") == 1


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([torch.ones(2, 8)], {}, r"the loss of this batch: Tensor\[2, 8\] of float32"),
        ([{"x": torch.ones(2, 8)}], {}, "returned no loss"),
        ([{"x": torch.ones(2, 8)}], {"loss_fn": F.mse_loss}, "has none of labels"),
        (batches(1), {"step_fn": lambda model, batch: 3.0}, "float as the loss"),
        (batches(1), {"step_fn": lambda model, batch: {"l": 1}}, "without 'loss'"),
        (batches(1), {"step_fn": lambda model, batch: torch.ones(())}, "has no gradient"),
    ],
)
def test_what_cannot_be_trained_on_is_a_clear_error(data, options, message):
    with pytest.raises((TrainingError, ValueError), match=message):
        fit(data=data, **options)


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_gradient_accumulation_steps_with_the_last_incomplete_group_too(sized):
    class Unsized:
        def __iter__(self):
            return iter(batches(5))

    model, optimizer = make()
    model.eval()
    hook = recorder("on_train_batch_end", on_step_end=("loss",))
    torch.manual_seed(0)
    trainer = Trainer(config(accumulate=2), model, optimizer, hooks=[hook])
    model.drop.p = 0.0
    trainer.fit(batches(5) if sized else Unsized())
    plain, plain_optimizer = make()
    plain.drop.p = 0.0
    data = batches(5)
    for group in (data[:2], data[2:4], data[4:]):
        for x, y in group:
            (F.mse_loss(plain(x), y) / len(group)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert trainer.step == 3
    for a, b in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(a, b)
    assert names(hook).count("on_train_batch_end") == 5


def test_several_optimizers_with_schedulers_and_intervals():
    model, _ = make()
    a = torch.optim.SGD(model.first.parameters(), lr=0.1)
    b = torch.optim.SGD(model.second.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(a, 1, gamma=0.5),
        torch.optim.lr_scheduler.StepLR(b, 1, gamma=0.1),
    ]
    hook = recorder(on_after_optimizer_step=("optimizer_idx", "step"), on_step_end=("lr",))
    fit(
        hook,
        model=model,
        optimizers=[a, b],
        schedulers=schedulers,
        optimizer_every=[1, 2],
    )
    turns = [(t["step"], t["optimizer_idx"]) for t in told_in(hook, "on_after_optimizer_step")]
    assert turns == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert [t["lr"] for t in told_in(hook, "on_step_end")] == [0.1, 0.05, 0.025, 0.0125]
    assert b.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)  # one for each of its own steps


def test_schedulers_may_step_once_an_epoch():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    hook = recorder(on_step_end=("lr",))
    fit(
        hook,
        model=model,
        optimizers=optimizer,
        schedulers=scheduler,
        scheduler_every="epoch",
        data=batches(2),
        max_epochs=2,
    )
    assert [t["lr"] for t in told_in(hook, "on_step_end")] == [0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize("how", [{"clip_norm": 0.01}, {"clip_value": 0.001}])
def test_gradients_are_clipped_and_the_norm_before_is_told(how):
    seen = []

    class Largest(hookline.Hook):
        def on_before_optimizer_step(self, model):
            seen.append(max(p.grad.abs().max().item() for p in model.parameters()))

    hook = recorder(on_gradient_clip=("grad_norm",), on_step_end=("grad_norm",))
    fit(Largest(), hook, data=batches(1), **how)
    assert seen[0] <= 0.01
    norm = float(told_in(hook, "on_gradient_clip")[0]["grad_norm"])
    assert norm == float(told_in(hook, "on_step_end")[0]["grad_norm"]) > 0.1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_train(precision):
    hook = recorder(on_after_forward=("outputs",), on_step_end=("loss",))
    trainer = fit(hook, precision=precision, data=batches(8))
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert told_in(hook, "on_after_forward")[0]["outputs"].dtype is kind
    assert trainer.step > 0


def test_a_scaler_that_skips_is_told():
    data = batches(3)
    data[1] = (data[1][0], torch.full_like(data[1][1], float("inf")))
    hook = recorder(on_step_skipped=("reason",), on_step_end=("step",))
    fit(hook, precision="fp16", data=data, on_nan="continue")
    assert "non-finite" in told_in(hook, "on_step_skipped")[0]["reason"]
    assert [a["step"] for a in told_in(hook, "on_step_end")] == [1, 1, 2]


def nan_at(i, n=6):
    data = batches(n)
    data[i] = (data[i][0], torch.full_like(data[i][1], float("nan")))
    return data


def test_a_nan_loss_stops_training_or_is_skipped_or_ignored():
    with pytest.raises(TrainingError, match=r"nan in epoch 0, loader 'train', batch 2"):
        fit(data=nan_at(2))
    hook = recorder(on_step_skipped=("reason",))
    model, optimizer = make()
    assert fit(hook, model=model, optimizers=optimizer, data=nan_at(2), on_nan="skip").step == 5
    assert told_in(hook, "on_step_skipped") == [{"reason": "the loss is nan"}]
    assert all(weight.isfinite().all() for weight in weights(model))
    assert fit(data=nan_at(2), on_nan="continue").step == 6


# -- loaders, validation, metrics -----------------------------------------------------------------


def test_several_loaders_have_metrics_of_their_own_and_over_all():
    hook = recorder(on_train_batch_end=("loader_name", "loss"), on_epoch_end=("metrics",))
    fit(
        hook,
        data={"web": batches(3), "code": batches(2, seed=5)},
        loaders={"order": "round_robin", "on_exhausted": "drop"},
    )
    told = [(a["loader_name"], float(a["loss"])) for a in told_in(hook, "on_train_batch_end")]
    assert [name for name, _ in told] == ["web", "code", "web", "code", "web"]
    metrics = told_in(hook, "on_epoch_end")[0]["metrics"]
    web = [loss for name, loss in told if name == "web"]
    assert metrics["train/dl_web/loss"] == pytest.approx(sum(web) / 3)
    assert metrics["train/loss"] == pytest.approx(sum(loss for _, loss in told) / 5)


def test_validation_is_told_and_leaves_no_trace():
    class Rolls(hookline.Hook):
        def on_validation_start(self, model):
            torch.rand(3)

        def on_validation_batch_end(self, model):
            torch.rand(3)
            assert not model.training

        on_validation_end = on_validation_start

    def run(val):
        model, optimizer = make()
        model.drop.eval()  # a mode of the user's own
        hook = recorder(on_validation_end=("metrics", "epoch"))
        fit(Rolls(), hook, model=model, optimizers=optimizer, val=val, max_epochs=2)
        assert model.training
        assert not model.drop.training
        return weights(model), hook

    plain, _ = run(None)
    validated, hook = run(batches(3, seed=9))
    assert same(plain, validated)
    ends = told_in(hook, "on_validation_end")
    assert [a["epoch"] for a in ends] == [0, 1]
    assert ends[0]["metrics"]["eval/loss"] == ends[0]["metrics"]["val/loss"] > 0


def test_validation_weighs_batches_by_their_samples():
    (x, y), _ = batches(2)
    hook = recorder(on_validation_end=("metrics",))
    model, optimizer = make()
    trainer = Trainer(config(), model, optimizer, hooks=[hook])
    metrics = trainer.validate([(x, y), (x[:1], y[:1])])
    whole = [F.mse_loss(model.eval()(a), b).item() for a, b in ((x, y), (x[:1], y[:1]))]
    assert metrics["val/loss"] == pytest.approx((whole[0] * 4 + whole[1]) / 5)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"max_epochs": 4, "validate_every_epochs": 2}, [8, 16]),
        ({"validate_every_steps": 2}, [2, 4, 4]),
        ({"validate_every_steps": 3, "validate_every_epochs": None}, [3]),
        ({"sanity": True}, [0, 4]),
    ],
)
def test_validation_comes_when_it_was_asked_for(fields, steps):
    hook = recorder(on_validation_end=("step",))
    fit(hook, val=batches(1), **fields)
    assert [a["step"] for a in told_in(hook, "on_validation_end")] == steps


def test_the_best_accuracy_is_kept():
    scores = iter([0.5, 0.75, 0.25])

    def step(model, batch):
        loss = F.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss} if model.training else {"loss": loss, "accuracy": next(scores)}

    class Improvement(hookline.Hook):
        def __init__(self):
            self.seen = []

        def on_validation_end(self, trainer, metrics):
            self.seen.append(metrics["val/accuracy"] - trainer.best_accuracy)

    hook = Improvement()
    trainer = fit(hook, step_fn=step, val=batches(1), max_epochs=3)
    assert hook.seen == [0.5, 0.25, -0.5]
    assert trainer.best_accuracy == 0.75


def test_the_state_has_the_keys_of_a_small_trainer():
    hook = recorder(on_batch_end=("state", "loss"))
    trainer = fit(hook, data=batches(3))
    state = dict(told_in(hook, "on_batch_end")[-1]["state"])
    losses = [float(a["loss"]) for a in told_in(hook, "on_batch_end")]
    assert state.pop("model") is trainer.model
    assert state.pop("optimizer") is trainer.optimizer
    assert state == {
        "device": torch.device("cpu"),
        "current_epoch": 0,
        "current_batch_idx": 2,
        "latest_loss": losses[-1],
        "avg_loss": pytest.approx(sum(losses) / 3),
        "model_params": sum(p.numel() for p in trainer.model.parameters()),
        "status": "training",
    }


# -- making one -----------------------------------------------------------------------------------


def test_get_trainer_has_its_data_and_its_configuration_as_keywords():
    model, optimizer = make()
    trainer = get_trainer(
        "simple", model, batches(2), optimizer, torch.device("cpu"), runs=None, progress="off"
    )
    trainer.add_hook(recorder("on_step_end"), "watch")
    trainer.disable_hook("watch")
    assert trainer.hooks.list_hooks() == ["watch", "identity"]
    trainer.train()
    assert trainer.step == 2
    with pytest.raises(hookline.ConfigError, match="Unknown tracker"):
        get_trainer("simple", model, batches(2), optimizer, name="small", trackers=["no such"])


def test_hooks_come_from_a_configuration_by_class_path():
    model, optimizer = make()
    path = "user_hooks.Lifecycle"
    hooks = HooksConfig(hook_classes=[path], hook_configs={path: {"threshold": 5.0}})
    trainer = GenericTrainer(hooks, model, optimizer)
    assert trainer.hook_manager.list_hooks() == ["lifecycle", "identity"]
    assert trainer.hooks.get_hook("lifecycle").threshold == 5.0
    assert trainer.config.debug is False


def test_a_configuration_may_be_a_mapping_and_nothing_else_is_one():
    trainer = Trainer({"runs": None, "progress": "off", "max_epochs": 2}, *make())
    assert trainer.fit(batches(2)).step == 4
    with pytest.raises(hookline.ConfigError, match="Did you mean 'max_epochs'"):
        Trainer({"max_epoch": 2}, *make())
    with pytest.raises(TypeError, match=r"is 'fast'; expected a TrainerConfig"):
        Trainer("fast", *make())
    with pytest.raises(hookline.ConfigError, match="'max_epochs' is 'many'"):
        trainer.config.max_epochs = "many"
    with pytest.raises(TrainingError, match="Unknown trainer 'fancy'"):
        get_trainer("fancy", *make(), batches(1))


def test_bad_parts_are_refused_when_the_trainer_is_made():
    model, optimizer = make()
    other = nn.Linear(2, 2)
    with pytest.raises(TrainingError, match="at least one"):
        Trainer(config(), model, [])
    with pytest.raises(TrainingError, match=r"share the parameter 'first\.weight'"):
        Trainer(config(), model, [optimizer, torch.optim.SGD(model.parameters(), lr=1)])
    with pytest.raises(TrainingError, match="none of this model"):
        Trainer(config(), model, torch.optim.SGD(other.parameters(), lr=1))
    with pytest.raises(TypeError, match="made with the trainer"):
        foreign = torch.optim.SGD(other.parameters(), lr=1)
        Trainer(config(), model, optimizer, torch.optim.lr_scheduler.StepLR(foreign, 1))
    with pytest.raises(TrainingError, match=r"add hooks to it with hookline\.attach"):
        Trainer(config(), model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TrainingError, match=r"is \[1, 2\] for 1 optim"):
        Trainer(config(optimizer_every=[1, 2]), model, optimizer)
    with pytest.raises(TrainingError, match=r"'cuda' cannot be used here|'nowhere'"):
        device = "nowhere" if torch.cuda.is_available() else "cuda"
        Trainer(config(device=device), model, optimizer)
    with pytest.raises(TrainingError, match="no data to train on"):
        Trainer(config(), model, optimizer).fit()
    with pytest.raises(TrainingError, match="no data to validate on"):
        Trainer(config(), model, optimizer).validate()
