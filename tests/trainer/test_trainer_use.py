"""The trainer as people use it: values, metrics, stopping, data, and what is shown."""

from __future__ import annotations

import argparse
import copy
import json
import pickle

import pytest
import torch
from loops import batches, config, fit, make, recorder, told_in, weights
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import Trainer, TrainingError
from hookline.hooks.checkpointing.model_checkpoint import ModelCheckpoint
from hookline.hooks.optimization.early_stopping import EarlyStopping
from hookline.runs import read_records
from hookline.trainer.losses import LossCheck


def values(run, name):
    return [row["value"] for row in read_records(run.path / "metrics.jsonl") if row["name"] == name]


# -- a loss that is not finite --------------------------------------------------------------------


def test_the_batch_of_a_nan_loss_ends_before_training_stops_and_no_step_is_made():
    hook = recorder(on_train_batch_end=("batch_idx", "loss"), on_step_end=("step",))
    model, optimizer = make()
    before = []

    class Keep(hookline.Hook):
        def on_step_end(self, model):
            before[:] = weights(model)

    trainer = Trainer(config(), model, optimizer, hooks=[hook, Keep()])
    data = batches(4)
    data[2] = (data[2][0], torch.full_like(data[2][1], float("nan")))
    with pytest.raises(TrainingError, match=r"The loss was nan.*batch 2"):
        trainer.fit(data)
    ends = told_in(hook, "on_train_batch_end")
    assert [end["batch_idx"] for end in ends] == [0, 1, 2]
    assert ends[-1]["loss"] != ends[-1]["loss"]
    assert (trainer.step, trainer.status) == (2, "error")
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


def test_on_an_accelerator_a_nan_loss_is_found_before_the_next_step():
    check = LossCheck("stop", deferred=True)
    assert check.check(torch.tensor(float("nan")), "batch 0") == ""
    with pytest.raises(TrainingError, match="batch 0"):
        check.check(torch.tensor(1.0), "batch 1")


# -- metrics that nobody measures -----------------------------------------------------------------


@pytest.mark.parametrize(
    "hook",
    [
        lambda: EarlyStopping(),
        lambda: ModelCheckpoint(monitor="val/loss"),
    ],
)
@pytest.mark.parametrize("val", [None, batches(1)])
def test_a_hook_that_needs_a_validation_that_never_comes_raises_before_the_first_step(
    tmp_path, hook, val
):
    fields = {} if val is None else {"validate_every_epochs": None}
    trainer = Trainer(config(runs=tmp_path, **fields), *make(), hooks=[hook()])
    missing = "give val_loaders" if val is None else "validate_every_epochs"
    with pytest.raises(TrainingError, match=f"needs the metric 'val/loss'.*{missing}"):
        trainer.fit(batches(2), val_loaders=val)
    assert trainer.step == 0
    assert not list(tmp_path.iterdir())


def test_a_metric_that_a_users_hook_may_add_is_not_missing(tmp_path):
    class Adds(hookline.Hook):
        def on_epoch_end(self, metrics):
            metrics["val/loss"] = 1.0

    hooks = [Adds(), EarlyStopping(check_on_train_epoch_end=True)]
    assert Trainer(config(), *make(), hooks=hooks).fit(batches(2)).status == "completed"


def test_reduce_lr_on_plateau_steps_in_the_epochs_that_were_validated():
    model, optimizer = make()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer = Trainer(config(max_epochs=4, validate_every_epochs=2), model, optimizer, plateau)
    trainer.fit(batches(2), val_loaders=batches(1))
    assert plateau.last_epoch == 2


# -- what is shown --------------------------------------------------------------------------------


def test_the_run_the_default_loss_and_the_reason_to_stop_are_shown(tmp_path, capsys):
    class Stops(hookline.Hook):
        def on_step_end(self, trainer, step):
            if step == 2:
                trainer.stop("enough")

    trainer = Trainer(config(runs=tmp_path, progress="plain"), *make(), hooks=[Stops()])
    trainer.fit(batches(4))
    shown = capsys.readouterr().out
    assert f"run {trainer.run.path}" in shown
    assert "No loss function was given: using the mean squared error" in shown
    assert "stopped after 2 steps in 0:00:00: enough" in shown


# -- the default loss -----------------------------------------------------------------------------


class Out(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.out = nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.out * 1


def default_loss(shape, targets):
    model = Out(*shape)
    trainer = Trainer(config(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model.out, trainer.compute_loss((torch.ones(1), targets))[0]


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        ((4, 1), torch.ones(4)),
        ((4, 5, 3), torch.zeros(4, 4, dtype=torch.long)),
    ],
)
def test_the_default_loss_does_not_broadcast(shape, targets):
    with pytest.raises(TrainingError, match=r"needs .*, but the outputs are .* Reshape one"):
        default_loss(shape, targets)


def test_logits_of_a_language_model_have_the_classes_last():
    targets = torch.randint(0, 7, (2, 5))
    logits, loss = default_loss((2, 5, 7), targets)
    assert torch.allclose(loss, F.cross_entropy(logits.reshape(-1, 7), targets.reshape(-1)))
    logits, loss = default_loss((2, 7, 5), targets)
    assert torch.allclose(loss, F.cross_entropy(logits, targets))
    with pytest.raises(TrainingError, match="the second or the last dimension"):
        default_loss((2, 5, 5), targets)
    assert default_loss((4, 3), torch.zeros(4, dtype=torch.int32))[1] > 0


# -- tokens ---------------------------------------------------------------------------------------


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, ids):
        return self.table(ids.long())


def tokens_of(inputs, **options):
    model = Embeds()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = recorder(on_step_end=("tokens_seen",))
    trainer = Trainer(config(), model, optimizer, hooks=[hook], **options)
    trainer.fit([(inputs, torch.zeros(inputs.shape, dtype=torch.long))] * 2)
    return [told["tokens_seen"] for told in told_in(hook, "on_step_end")]


def test_integer_inputs_of_two_dimensions_are_tokens(caplog):
    ids = torch.zeros(3, 4, dtype=torch.long)
    assert tokens_of(ids) == [12, 24]
    assert tokens_of(ids, tokens_fn=lambda batch: 5) == [5, 10]
    assert tokens_of(ids, tokens_fn=None) == [0, 0]
    assert not caplog.records
    assert tokens_of(ids[0]) == tokens_of(ids.to(torch.uint8)) == [0, 0]
    assert all("Trainer(tokens_fn=" in record.message for record in caplog.records)
    assert len(caplog.records) == 2  # one for each of the two trainers


def test_an_unknown_number_of_tokens_is_null_in_the_record(tmp_path, caplog):
    class Saves(hookline.Hook):
        def on_step_end(self, trainer):
            trainer.save_checkpoint()

    def tokens(**options):
        trainer = Trainer(config(runs=tmp_path), *make(), hooks=[Saves()], **options)
        trainer.fit(batches(1))
        lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
        return [e["tokens_seen"] for e in map(json.loads, lines) if e["kind"] == "checkpoint"]

    assert tokens() == tokens(tokens_fn=None) == [None]
    assert tokens(tokens_fn=lambda batch: 7) == [7]
    assert not caplog.records  # no hook asked


# -- data -----------------------------------------------------------------------------------------


def test_a_generator_is_an_error_before_training_when_there_are_several_epochs():
    trainer = Trainer(config(max_epochs=2), *make())
    with pytest.raises(TypeError, match=r"iterator \(generator\).*2 epochs are asked for.*list"):
        trainer.fit(batch for batch in batches(2))
    assert trainer.step == 0
    trainer = Trainer(config(max_epochs=1), *make())
    assert trainer.fit(batch for batch in batches(2)).step == 2


# -- the trainer as an object ---------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_trainer_says_what_to_save_instead_of_it(copied):
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*save_checkpoint\(path\)"):
        copied(Trainer(config(), *make()))


def test_should_stop_can_be_set():
    class Stops(hookline.Hook):
        def on_step_end(self, trainer, step):
            assert not trainer.should_stop
            trainer.should_stop = step == 2

    trainer = Trainer(config(), *make(), hooks=[Stops()]).fit(batches(4))
    assert (trainer.step, trainer.status, trainer.should_stop) == (2, "stopped", True)


def test_a_trainer_keeps_hyperparameters_name_and_tags():
    trainer = Trainer(config(), *make(), hparams={"width": 8}, name="first", tags=["a", "b"])
    assert (trainer.hparams, trainer.name, trainer.tags) == ({"width": 8}, "first", ["a", "b"])
    trainer = Trainer(config(), *make(), hparams=argparse.Namespace(lr=1.0), tags="one")
    assert (trainer.hparams, trainer.name, trainer.tags) == ({"lr": 1.0}, None, ["one"])
    with pytest.raises(TypeError, match="hparams is 3; expected a mapping"):
        Trainer(config(), *make(), hparams=3)


@pytest.mark.parametrize("how", [{"max_epochs": 2}, {"max_steps": 4}])
def test_the_epoch_of_a_finished_run_is_the_same_after_resuming_it(tmp_path, how):
    trainer = Trainer(config(**how), *make()).fit(batches(2))
    saved = trainer.save_checkpoint(tmp_path / "saved")
    resumed = Trainer(config(**how), *make()).fit(batches(2), resume_from=saved)
    assert (resumed.epoch, resumed.step) == (trainer.epoch, trainer.step) == (1, 4)


def test_metrics_of_a_step_function_are_recorded_for_each_step_and_epoch(tmp_path):
    def step_fn(model, batch):
        loss = F.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, "double": 2 * loss, "one": 1}

    trainer = Trainer(config(runs=tmp_path, accumulate=2), *make(), step_fn=step_fn)
    trainer.fit(batches(4))
    losses = values(trainer.run, "train/loss")
    assert len(losses) == 2
    assert values(trainer.run, "train/double") == pytest.approx([2 * loss for loss in losses])
    assert values(trainer.run, "train/one") == [1, 1]
    assert values(trainer.run, "train/double_epoch") == pytest.approx([sum(losses)])


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m, o: ((m, o), {}), r"expected a TrainerConfig.*Trainer\(config, model"),
        (lambda m, o: ((None, type(m), o), {}), r"expected a torch.nn.Module"),
        (lambda m, o: ((None, m, "adam"), {}), r"optimizers is 'adam'; expected one torch.optim"),
        (lambda m, o: ((None, m, o), {"loss_fn": nn.MSELoss}), r"loss_fn is the class MSELoss"),
        (
            lambda m, o: ((None, m, o), {"loss_fn": nn.ReLU()}),
            r"loss_fn is called with \(outputs, targets\), and ReLU\(input\) does not take these",
        ),
        (lambda m, o: ((None, m, o), {"tokens_fn": lambda: 0}), r"called with \(batch\)"),
        (
            lambda m, o: ((None, m, o), {"schedulers": "cosine"}),
            r"schedulers has 'cosine'.*StepLR\(",
        ),
    ],
)
def test_a_mistake_in_the_arguments_is_explained(arguments, message):
    given, named = arguments(*make())
    with pytest.raises(TypeError, match=message):
        Trainer(*given, **named)


@pytest.mark.parametrize("value", [torch.ones(3), "text"])
def test_a_metric_that_is_not_a_number_is_refused_at_the_first_batch(value):
    def step(model, batch):
        return {"loss": F.mse_loss(model(batch[0]), batch[1]), "logits": value}

    trainer = Trainer(config(), *make(), step_fn=step)
    with pytest.raises(TrainingError, match=r"step_fn returned .* as the metric 'logits'"):
        trainer.fit(batches(3))
    assert trainer.step == 0


# -- what is recorded --------------------------------------------------------------------------


def test_values_are_recorded_by_kind_with_their_step_and_epoch(tmp_path):
    class Logs(hookline.Hook):
        def on_step_end(self, trainer, model, step):
            trainer.log("x", step)
            trainer.log("scalar", torch.tensor(2.5))
            trainer.log("words", "hello", kind="text")
            trainer.log("weights", model.first.weight.detach(), kind="histogram")
            trainer.log("picture", torch.rand(3, 4, 5), kind="image")

    trainer = fit(Logs(), data=batches(2), runs=tmp_path, max_epochs=2)
    records = list(read_records(trainer.run.path / "metrics.jsonl"))
    told = [(r["step"], r["epoch"], r["value"]) for r in records if r["name"] == "x"]
    assert told == [(1, 0, 1), (2, 0, 2), (3, 1, 3), (4, 1, 4)]
    by_name = {record["name"]: record for record in records if record["step"] == 1}
    assert by_name["scalar"]["value"] == 2.5
    assert (by_name["words"]["kind"], by_name["words"]["value"]) == ("text", "hello")
    assert sum(by_name["weights"]["value"]["counts"]) == 128
    assert (trainer.run.path / by_name["picture"]["value"]["path"]).read_bytes()[1:4] == b"PNG"
