"""Where a trainer could go wrong: after the end, by hand, in turns, at the seams of an epoch."""

from __future__ import annotations

import json

import pytest
import torch
from loops import batches, config, fit, make, recorder, same, told_in, weights
from torch.nn import functional as F

import hookline
from hookline import Trainer


def two(model):
    return (
        torch.optim.SGD(model.first.parameters(), lr=0.1),
        torch.optim.SGD(model.second.parameters(), lr=0.1),
    )


def test_after_the_end_one_can_still_validate_save_and_log(tmp_path):
    trainer = Trainer(config(runs=tmp_path), *make())
    trainer.fit(batches(2), val_loaders=batches(1))
    assert trainer.validate()["val/loss"] > 0
    saved = trainer.save_checkpoint()
    assert saved.parent == trainer.run.path / "checkpoints"
    trainer.log("late", 1.0)


def test_clipping_several_optimizers_tells_the_norm_of_all_gradients():
    hook = recorder(on_step_end=("grad_norm",), on_gradient_clip=("grad_norm",))
    model, _ = make()
    norms = []

    class Norm(hookline.Hook):
        def on_after_backward(self, model):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))

    Trainer(config(clip_norm=0.1), model, two(model), hooks=[Norm(), hook]).fit(batches(1))
    assert float(told_in(hook, "on_step_end")[0]["grad_norm"]) == pytest.approx(norms[0].item())


# -- by hand --------------------------------------------------------------------------------------


def test_a_checkpoint_made_by_hand_can_be_resumed(tmp_path):
    trainer = Trainer(config(), *make())
    for batch in batches(2):
        trainer.training_step(batch)
    saved = trainer.save_checkpoint(tmp_path / "mine")
    trainer.finish()
    assert fit(data=batches(3), resume_from=saved, max_steps=5).step == 5


# -- the seams of an epoch ------------------------------------------------------------------------


def test_a_fit_after_a_failed_one_is_clean(tmp_path):
    calls = []

    def step(model, batch):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return F.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(config(runs=tmp_path, accumulate=3), *make(), step_fn=step)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches(3))
    trainer.fit(batches(3))
    manifest = json.loads((trainer.run.path / "manifest.json").read_text())
    assert (manifest["status"], manifest["last_error"]) == ("completed", None)
    assert trainer.step == 1


def test_a_run_with_an_option_that_is_gone_and_was_off_is_found_again(tmp_path):
    fails = [True]

    class Saves(hookline.Hook):
        critical = True

        def on_step_end(self, trainer, step):
            trainer.save_checkpoint()
            if step == 2 and fails.pop():
                raise ZeroDivisionError

    def trainer():
        return Trainer(config(runs=tmp_path, max_steps=4, seed=1), *make(), hooks=[Saves()])

    first = trainer()
    with pytest.raises(hookline.HookFailedError):
        first.fit(batches(4))
    file = first.run.path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["fast_forward"] = False
    file.write_text(json.dumps(manifest))
    fails.append(False)
    again = trainer().fit(batches(4), resume_from="auto")
    assert (again.run.id, again.step) == (first.run.id, 4)


def test_the_record_says_why_training_stopped_and_which_hooks_were_toggled(tmp_path):
    class Stops(hookline.Hook):
        def on_step_end(self, trainer):
            trainer.disable_hook("other")
            trainer.stop("good enough")

    trainer = Trainer(config(runs=tmp_path), *make(), hooks=[Stops()])
    trainer.add_hook(recorder("on_epoch_end"), "other")
    trainer.fit(batches(3))
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    events = {event["kind"]: event for event in map(json.loads, lines)}
    assert events["end"]["reason"] == "good enough"
    assert events["hooks"]["hooks"] == {"other": "disabled"}


def test_gradients_that_wait_for_their_turn_follow_the_scale_of_fp16():
    def trained(growth_interval):
        model, _ = make()
        trainer = Trainer(config(optimizer_every=[1, 2], precision="fp16"), model, two(model))
        trainer.strategy.scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, growth_interval=growth_interval
        )
        trainer.fit(batches(4))
        return trainer.strategy.scaler.get_scale(), weights(model)

    scale, expected = trained(growth_interval=1000)
    grown, actual = trained(growth_interval=1)
    assert scale == 256.0
    assert grown > scale
    assert same(actual, expected)


@pytest.mark.parametrize("at", [0, 1])
def test_a_nan_loss_that_is_skipped_leaves_nothing_to_any_optimizer(at):
    model, _ = make()
    data = batches(4)
    data[at] = (data[at][0], torch.full_like(data[at][1], float("nan")))
    trainer = Trainer(config(optimizer_every=[1, 2], on_nan="skip"), model, two(model)).fit(data)
    assert trainer.step == 3
    assert all(weight.isfinite().all() for weight in weights(model))
