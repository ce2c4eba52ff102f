"""Stopping, skipping, saving: asked for anywhere, done at a boundary, on all ranks together."""

from pathlib import Path

import pytest
import torch
from loops import Net, batches, config, fit, make, same, weights

import hookline
from hookline import Trainer


def test_checkpoints_that_are_asked_for_within_a_step_are_all_saved_at_its_end(tmp_path):
    saved = []

    class Asks(hookline.Hook):
        def on_train_batch_end(self, trainer, step):
            if step == 2:
                assert trainer.save_checkpoint(tmp_path / "a") is None
                assert trainer.save_checkpoint(tmp_path / "b") is None
                assert trainer.save_checkpoint(tmp_path / "a") is None  # once is enough
                assert not (tmp_path / "a").exists()

        def on_step_end(self, step):
            assert (tmp_path / "a").exists() == (step > 2)

        def on_checkpoint_save(self, checkpoint_path: Path, step):
            saved.append((checkpoint_path.name, step))

    trainer = fit(Asks(), checkpoints={"background": False})
    assert saved == [("a", 2), ("b", 2)]
    assert trainer.hooks.summary().failures == {}


def test_a_checkpoint_asked_for_by_a_checkpoint_waits_for_the_next_boundary(tmp_path):
    class Chain(hookline.Hook):
        def on_step_end(self, trainer, step):
            if step == 1:
                trainer.save_checkpoint(tmp_path / "first")

        def on_checkpoint_save(self, trainer, checkpoint_path: Path, step):
            if checkpoint_path.name == "first":
                trainer.save_checkpoint(tmp_path / "second")
                assert not (tmp_path / "second").exists()

    trainer = fit(Chain(), checkpoints={"background": False})
    assert (tmp_path / "second").is_dir()
    assert trainer.hooks.summary().failures == {}


def test_a_skip_asked_for_after_a_step_leaves_out_the_next_one_only():
    skipped = []

    class Skips(hookline.Hook):
        def on_step_end(self, trainer, ctx):
            skipped.append(ctx.skipped)
            if len(skipped) == 1:
                trainer.skip_optimizer_step()

    assert fit(Skips()).step == 3
    assert skipped == [False, True, False, False]


def test_the_first_reason_to_stop_is_the_one_that_is_told(tmp_path):
    class Stops(hookline.Hook):
        def on_step_end(self, trainer):
            trainer.stop("first")
            trainer.stop("second")

    trainer = fit(Stops(), runs=tmp_path)
    assert trainer.step == 1
    assert '"reason": "first"' in (trainer.run.path / "events.jsonl").read_text()


@pytest.mark.parametrize("event", ["on_train_start", "on_epoch_end"])
def test_a_stop_outside_of_steps_ends_training_there(event):
    hook = type("Stops", (hookline.Hook,), {event: lambda self, trainer: trainer.stop("now")})()
    trainer = fit(hook, data=batches(2), max_epochs=3)
    assert (trainer.status, trainer.step) == ("stopped", 0 if event == "on_train_start" else 2)


class Counting(torch.optim.SGD):
    zeroed = 0

    def zero_grad(self, set_to_none=True):
        self.zeroed += 1
        super().zero_grad(set_to_none)


def test_an_optimizer_with_a_zero_grad_of_its_own_has_it_called():
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    optimizer = Counting(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    Trainer(config(), model, optimizer).fit(batches(3))
    assert optimizer.zeroed == 3
    torch.manual_seed(3)
    Trainer(config(), plain, torch.optim.SGD(plain.parameters(), lr=0.1)).fit(batches(3))
    assert same(weights(plain), weights(model))


def test_parameters_that_join_an_optimizer_while_training_are_zeroed_too():
    gradients = []

    class Unfreezes(hookline.Hook):
        def on_step_end(self, step, trainer, model, optimizer):
            if step == 1:
                optimizer.add_param_group({"params": list(model.second.parameters())})

        def on_train_batch_start(self, model):
            gradients.append(sum(p.grad is not None for p in model.parameters()))

    model = Net()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    fit(Unfreezes(), model=model, optimizers=optimizer)
    assert gradients == [0, 0, 0, 0]


def test_several_processes_are_an_error_for_the_strategy_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    with pytest.raises(hookline.TrainingError, match=r"runs in 2 processes.*Use strategy='ddp'"):
        Trainer({"runs": tmp_path / "runs", "strategy": "single"}, *make())
    assert not (tmp_path / "runs").exists()


def test_one_process_under_torchrun_trains(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fit().step == 4
