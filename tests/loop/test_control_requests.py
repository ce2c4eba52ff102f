"""Stopping, skipping, saving: asked for anywhere, done at a boundary, on all ranks together."""

from pathlib import Path

import pytest
import torch
from loops import Net, batches, config, make, run_on_two_ranks, same, weights

import hookline
from hookline import Trainer


def test_checkpoints_that_are_asked_for_within_a_step_are_all_saved_at_its_end(tmp_path):
    class Asks(hookline.Hook):
        saved: list

        def on_train_batch_end(self, trainer, step):
            if step == 2:
                assert trainer.save_checkpoint(tmp_path / "a") is None
                assert trainer.save_checkpoint(tmp_path / "b") is None
                assert trainer.save_checkpoint(tmp_path / "a") is None  # once is enough
                assert not (tmp_path / "a").exists()

        def on_step_end(self, step):
            assert (tmp_path / "a").exists() == (step > 2)

        def on_checkpoint_save(self, checkpoint_path: Path, step):
            self.saved.append((checkpoint_path.name, step))

    hook = Asks()
    hook.saved = []
    trainer = Trainer(config(checkpoints={"background": False}), *make(), hooks=[hook])
    trainer.fit(batches(4))
    assert hook.saved == [("a", 2), ("b", 2)]
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

    trainer = Trainer(config(checkpoints={"background": False}), *make(), hooks=[Chain()])
    trainer.fit(batches(2))
    assert (tmp_path / "second").is_dir()
    assert trainer.hooks.summary().failures == {}


def test_a_skip_asked_for_after_a_step_leaves_out_the_next_one_only():
    class Skips(hookline.Hook):
        skipped: list

        def on_step_end(self, trainer, step, ctx):
            self.skipped.append(ctx.skipped)
            if len(self.skipped) == 1:
                trainer.skip_optimizer_step()

    hook = Skips()
    hook.skipped = []
    trainer = Trainer(config(), *make(), hooks=[hook]).fit(batches(4))
    assert hook.skipped == [False, True, False, False]
    assert trainer.step == 3


def test_the_first_reason_to_stop_is_the_one_that_is_told(tmp_path):
    class Stops(hookline.Hook):
        def on_step_end(self, trainer):
            trainer.stop("first")
            trainer.stop("second")

    trainer = Trainer(config(runs=tmp_path), *make(), hooks=[Stops()]).fit(batches(4))
    assert trainer.step == 1
    assert '"reason": "first"' in (trainer.run.path / "events.jsonl").read_text()


@pytest.mark.parametrize("event", ["on_train_start", "on_epoch_end"])
def test_a_stop_outside_of_steps_ends_training_there(event):
    hook = type("Stops", (hookline.Hook,), {event: lambda self, trainer: trainer.stop("now")})()
    trainer = Trainer(config(max_epochs=3), *make(), hooks=[hook]).fit(batches(2))
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
    class Unfreezes(hookline.Hook):
        gradients: list

        def on_step_end(self, step, trainer, model, optimizer):
            if step == 1:
                optimizer.add_param_group({"params": list(model.second.parameters())})

        def on_train_batch_start(self, model):
            self.gradients.append([p.grad for p in model.parameters() if p.grad is not None])

    model = Net()
    hook = Unfreezes()
    hook.gradients = []
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    Trainer(config(), model, optimizer, hooks=[hook]).fit(batches(4))
    assert [len(found) for found in hook.gradients] == [0, 0, 0, 0]


ONE_RUN_PER_RANK = """
import os, torch, hookline
if os.environ.get("WITH_GROUP"):
    torch.distributed.init_process_group("gloo")
    del os.environ["WORLD_SIZE"]
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = (torch.ones(2, 4), torch.ones(2, 2))
try:
    hookline.Trainer({"runs": RUNS, "strategy": "single"}, model, optimizer)
except hookline.TrainingError as error:
    print(str(error).replace("\\n", " "), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_group", [False, True], ids=["environment", "process_group"])
def test_several_processes_are_an_error_for_the_strategy_of_one(tmp_path, monkeypatch, with_group):
    if with_group:
        monkeypatch.setenv("WITH_GROUP", "1")
    runs = tmp_path / "runs"
    script = ONE_RUN_PER_RANK.replace("RUNS", repr(str(runs)))
    printed = run_on_two_ranks(script, tmp_path)
    assert printed.count("this script runs in 2 processes") == 2
    assert "Use strategy='ddp'" in printed
    assert not runs.exists()


@pytest.mark.parametrize("size", ["1", ""])
def test_one_process_under_torchrun_trains(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert Trainer(config(), *make()).fit(batches(2)).step == 2
