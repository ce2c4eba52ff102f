"""Checkpoints of a trainer, and what resuming from them gives: the same run, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net, batches, make, recorder, same, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import CheckpointError, Trainer, TrainerConfig, TrainingError
from hookline.runs import read_records


def settings(tmp_path: Path, **fields):
    return TrainerConfig(**({"runs": tmp_path / "runs", "progress": "off"} | fields))


class Counter(hookline.Hook):
    """A hook with a state."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class SaveAt(hookline.Hook):
    def __init__(self, step):
        self.at = step

    def on_step_end(self, trainer, step):
        if step == self.at:
            trainer.save_checkpoint()


def parts(precision="fp32"):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, optimizer, scheduler


def shuffled(own_generator: bool):
    generator = torch.Generator().manual_seed(5) if own_generator else None
    data = batches(1, seed=3)[0]
    x, y = (torch.randn(24, 8, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    assert data
    return DataLoader(TensorDataset(x, y[:, :4]), batch_size=4, shuffle=True, generator=generator)


@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "generator"])
@pytest.mark.parametrize("at", [1, 4, 6, 7, 12], ids=lambda at: f"step{at}")
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.soak)])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, at, own_generator, precision):
    fields = {"max_epochs": 3, "seed": 7, "precision": precision, "clip_norm": 1.0}
    model, optimizer, scheduler = parts()
    whole = recorder(on_step_end=("step", "loss", "lr"), on_epoch_end=("metrics",))
    trainer = Trainer(
        settings(tmp_path, **fields),
        model,
        optimizer,
        scheduler,
        hooks=[whole, Counter(), SaveAt(at)],
    )
    trainer.fit(shuffled(own_generator), val_loaders=batches(2, seed=8))
    saved = trainer.run.path / "checkpoints" / f"step_{at:06d}"

    torch.manual_seed(99)  # whatever happened since
    model_2, optimizer_2, scheduler_2 = parts()
    rest = recorder(on_step_end=("step", "loss", "lr"), on_epoch_end=("metrics",))
    counter = Counter()
    resumed = Trainer(
        settings(tmp_path, **fields),
        model_2,
        optimizer_2,
        scheduler_2,
        hooks=[rest, counter, SaveAt(0)],
    )
    resumed.fit(shuffled(own_generator), val_loaders=batches(2, seed=8), resume_from=saved)
    assert same(weights(model_2), weights(model))

    def steps(hook):
        told = [a for name, a in hook.told if name == "on_step_end"]
        return [(a["step"], float(a["loss"]), a["lr"]) for a in told]

    assert steps(rest) == steps(whole)[at:]
    assert counter.steps == 18
    ends = [a["metrics"] for name, a in whole.told if name == "on_epoch_end"]
    rest_ends = [a["metrics"] for name, a in rest.told if name == "on_epoch_end"]
    assert rest_ends[-1]["val/loss"] == ends[-1]["val/loss"]
    assert rest_ends[0]["train/loss"] == pytest.approx(ends[3 - len(rest_ends)]["train/loss"])


def test_a_resumed_run_goes_on_in_its_folder_and_keeps_its_id(tmp_path):
    model, optimizer, scheduler = parts()
    trainer = Trainer(settings(tmp_path), model, optimizer, scheduler, hooks=[SaveAt(2)])
    trainer.fit(batches(4))
    run = trainer.run
    hook = recorder(on_train_start=("step",), on_checkpoint_load=("path", "step"))
    again = Trainer(settings(tmp_path), *parts()[:3], hooks=[hook])
    again.fit(batches(4), resume_from=run.path)
    assert again.run.id == run.id
    assert len(json.loads((run.path / "manifest.json").read_text())["attempts"]) == 2
    assert [name for name, _ in hook.told] == ["on_train_start", "on_checkpoint_load"]
    assert hook.told[1][1]["step"] == 2
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_run_leaves_its_record(tmp_path):
    class Logs(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.log("mine", step * 10)
            trainer.log_dict({"a": 1, "b": 2.5})

    model, optimizer = make()
    trainer = Trainer(settings(tmp_path, seed=3), model, optimizer, hooks=[Logs()])
    trainer.fit(batches(3), val_loaders=batches(1))
    manifest = json.loads((trainer.run.path / "manifest.json").read_text())
    assert manifest["status"] == "completed"
    assert manifest["seed"] == 3
    assert manifest["config"]["max_epochs"] == 1
    assert [hook["name"] for hook in manifest["hooks"]] == ["logs", "identity"]
    lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    by_name = {name: [r["value"] for r in records if r["name"] == name] for name in ("mine", "b")}
    assert by_name == {"mine": [10, 20, 30], "b": [2.5] * 3}
    names = [record["name"] for record in records]
    assert names.count("train/loss") == 3
    assert names.count("train/loss_epoch") == names.count("val/loss") == 1
    events = (trainer.run.path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in events] == ["start", "end"]


def test_a_failed_run_says_so_in_its_manifest(tmp_path):
    def broken(model, batch):
        raise ZeroDivisionError("my step")

    model, optimizer = make()
    trainer = Trainer(settings(tmp_path), model, optimizer, step_fn=broken)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches(1))
    manifest = json.loads((trainer.run.path / "manifest.json").read_text())
    assert manifest["status"] == "error"
    assert "my step" in manifest["last_error"]


def test_a_checkpoint_asked_for_within_a_step_is_made_at_its_end(tmp_path):
    saved = []

    class Saves(hookline.Hook):
        def on_after_backward(self, trainer):
            assert trainer.save_checkpoint() is None

        def on_checkpoint_save(self, path: Path, step, trainer):
            saved.append((path.name, step))
            assert (path / "manifest.json").is_file()

    model, optimizer = make()
    Trainer(settings(tmp_path), model, optimizer, hooks=[Saves()]).fit(batches(2))
    assert saved == [("step_000001", 1), ("step_000002", 2)]


def test_a_checkpoint_needs_a_place(tmp_path):
    model, optimizer = make()
    trainer = Trainer(settings(tmp_path, runs=None), model, optimizer)
    trainer.fit(batches(1))
    with pytest.raises(TrainingError, match="Give a path"):
        trainer.save_checkpoint()
    assert trainer.save_checkpoint(tmp_path / "mine").is_dir()


def test_resuming_with_other_parts_or_data_is_a_clear_error(tmp_path):
    model, optimizer, scheduler = parts()
    trainer = Trainer(settings(tmp_path), model, optimizer, scheduler, hooks=[SaveAt(3)])
    trainer.fit(batches(4))
    where = trainer.run.path / "checkpoints" / "step_000003"
    with pytest.raises(CheckpointError, match="the checkpoint has 1 scheduler, and here are 0"):
        Trainer(settings(tmp_path), *parts()[:2]).fit(batches(4), resume_from=where)
    with pytest.raises(CheckpointError, match=r"after 3 batches .* it has only 1"):
        Trainer(settings(tmp_path), *parts()).fit(batches(1), resume_from=where)
    with pytest.raises(hookline.HooklineError, match="nowhere"):
        Trainer(settings(tmp_path), *parts()).fit(batches(4), resume_from=tmp_path / "nowhere")


def test_all_differences_are_listed_and_nothing_is_changed(tmp_path):
    model, optimizer, scheduler = parts()
    first = Trainer(settings(tmp_path), model, optimizer, scheduler, hooks=[SaveAt(3)])
    first.fit(batches(4))
    manifest = (first.run.path / "manifest.json").read_bytes()

    torch.manual_seed(1)
    other = torch.nn.Sequential(torch.nn.Linear(8, 4))
    before = weights(other)
    trainer = Trainer(settings(tmp_path), other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(CheckpointError) as error:
        trainer.fit(batches(4), resume_from=first.run.path)
    for line in ("the checkpoint lacks", "the model lacks", "AdamW in the checkpoint and SGD here"):
        assert line in str(error.value)
    assert same(weights(other), before)
    assert (first.run.path / "manifest.json").read_bytes() == manifest


def test_a_model_with_an_expanded_buffer_is_resumed(tmp_path):
    def train(resume_from=None):
        model, optimizer = make()
        model.register_buffer("scale", torch.ones(1, 4).expand(3, 4))
        trainer = Trainer(settings(tmp_path, seed=1), model, optimizer, hooks=[SaveAt(2)])
        return trainer.fit(batches(4), resume_from=resume_from)

    whole = train()
    resumed = train(whole.run.path)
    assert same(weights(resumed.model), weights(whole.model))
    assert torch.equal(resumed.model.scale, whole.model.scale)


def test_data_that_does_not_fit_changes_nothing(tmp_path):
    dataset = TensorDataset(torch.randn(12, 8), torch.randn(12, 4))
    first = Trainer(settings(tmp_path), *make(), hooks=[SaveAt(2)])
    first.fit(DataLoader(dataset, batch_size=3))
    model, optimizer = make()
    before = weights(model)
    trainer = Trainer(settings(tmp_path), model, optimizer)
    with pytest.raises(CheckpointError, match="batch size 3"):
        trainer.fit(DataLoader(dataset, batch_size=4), resume_from=first.run.path)
    assert same(weights(model), before)


def test_attributes_that_hooks_register_are_restored(tmp_path):
    class Best(hookline.Hook):
        def on_train_start(self, trainer):
            trainer.best_step = 0
            trainer.register_for_checkpoint("best_step")

        def on_step_end(self, trainer, step):
            if step <= 3:
                trainer.best_step = step
            if step == 3:
                trainer.save_checkpoint()

    first = Trainer(settings(tmp_path), *make(), hooks=[Best()])
    first.fit(batches(4))
    second = Trainer(settings(tmp_path), *make(), hooks=[Best()])
    second.fit(batches(4), resume_from=first.run.path)
    assert (first.best_step, second.best_step) == (3, 3)
    with pytest.raises(hookline.ArgumentError, match="no attribute 'worst'"):
        second.register_for_checkpoint("worst")


def test_resuming_automatically_continues_the_same_training_or_starts(tmp_path):
    armed = True

    class Interrupt(hookline.Hook):
        def on_step_end(self, step):
            if armed and step == 4:
                raise KeyboardInterrupt

    def make_trainer(*hooks, lr=0.1):
        model, optimizer = make()
        optimizer.param_groups[0]["lr"] = lr
        return Trainer(settings(tmp_path), model, optimizer, hooks=[SaveAt(3), Interrupt(), *hooks])

    first = make_trainer()
    with pytest.raises(KeyboardInterrupt):
        first.fit(batches(6), resume_from="auto")
    armed = False
    others = [make_trainer(Counter()), make_trainer(lr=0.2)]
    for trainer in others:
        trainer.fit(batches(6), resume_from="auto")
        assert trainer.run.path != first.run.path
    again = make_trainer()
    again.fit(batches(6), resume_from="auto")
    assert again.run.path == first.run.path
    assert [part["resumed_from"] for part in again.run.manifest["attempts"]] == [
        None,
        "step_000003",
    ]
    after = make_trainer()
    after.fit(batches(6), resume_from="auto")  # it is finished now
    assert after.run.path != first.run.path


def test_a_training_whose_learning_rate_a_hook_sets_is_resumed_automatically_again_and_again(
    tmp_path,
):
    class SetRate(hookline.Hook):
        intervenes = True

        def on_step_end(self, trainer, step):
            trainer.optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 1:
                trainer.save_checkpoint()

        def on_train_batch_start(self):
            if getattr(self, "steps", 0) == 2:
                raise KeyboardInterrupt

    paths = set()
    for steps in (2, 3, 4):
        trainer = Trainer(settings(tmp_path), *make(), hooks=[SetRate()])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(batches(8), resume_from="auto")
        assert trainer.step == steps
        paths.add(trainer.run.path)
    assert len(paths) == 1


def test_the_nearest_run_is_named_if_there_is_none_to_resume(tmp_path, capsys):
    class Interrupt(hookline.Hook):
        def on_train_batch_start(self, batch_idx):
            if batch_idx == 4:
                raise KeyboardInterrupt

    first = Trainer(settings(tmp_path), *make(), hooks=[SaveAt(3), Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        first.fit(batches(6))
    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.2
    other = Trainer(
        settings(tmp_path, accumulate=2, progress="plain"), model, optimizer, hooks=[SaveAt(3)]
    )
    other.fit(batches(6), resume_from="auto")
    said = capsys.readouterr().out
    assert f"The nearest unfinished run is {first.run.id} (interrupted), which differs:" in said
    assert "the hook 'interrupt' is only there" in said
    assert "accumulate is 2 here, 1 there" in said
    assert "optimizers.0.groups.0.lr is 0.2 here, 0.1 there" in said
    assert "progress" not in said.partition("which differs")[2].partition("To continue")[0]


def test_what_was_recorded_before_a_checkpoint_is_there_when_it_is(tmp_path):
    class Looks(hookline.Hook):
        recorded = 0

        def on_step_end(self, trainer, step):
            if step == 3:
                trainer.save_checkpoint()

        def on_checkpoint_save(self, trainer):
            # What a process that is killed now leaves behind.
            found = read_records(trainer.run.path / "metrics.jsonl")
            self.recorded = [one["step"] for one in found if one["name"] == "train/loss"]

    looks = Looks()
    model, optimizer = make()
    config = TrainerConfig(runs=tmp_path, progress="off")
    Trainer(config, model, optimizer, hooks=[looks]).fit(batches(5))
    assert looks.recorded[:3] == [1, 2, 3]

    assert looks.recorded == [1, 2, 3]


def test_settings_that_end_before_the_checkpoint_are_warned_about(tmp_path, caplog):
    first = Trainer(settings(tmp_path, max_epochs=2), *parts(), hooks=[SaveAt(7)])
    first.fit(batches(4))
    for fields, text in (
        ({"max_epochs": 1}, "max_epochs is 1"),
        ({"max_steps": 5}, "max_steps is 5"),
        ({"max_epochs": 2}, ""),
    ):
        caplog.clear()
        trainer = Trainer(settings(tmp_path, **fields), *parts(), hooks=[SaveAt(0)])
        trainer.fit(batches(4), resume_from=first.run.path)
        assert ("Nothing is left to train" in caplog.text) == bool(text)
        assert text in caplog.text


def test_lazy_modules_are_resumed_before_their_first_call(tmp_path):
    def train(at, resume_from=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.LazyLinear(16), torch.nn.LazyLinear(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = Trainer(settings(tmp_path, seed=1), model, optimizer, hooks=[SaveAt(at)])
        return trainer.fit(batches(4), resume_from=resume_from)

    first = train(2)
    assert same(weights(train(0, first.run.path).model), weights(first.model))


def test_a_checkpoint_in_the_folder_of_another_run_does_not_change_that_run(tmp_path):
    def train(*hooks, resume_from=None):
        trainer = Trainer(settings(tmp_path), *parts(), hooks=hooks)
        return trainer.fit(batches(6), resume_from=resume_from)

    other = train()
    before = (other.run.path / "metrics.jsonl").read_bytes()

    class SaveElsewhere(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.log("longer records", step)
            if step == 4:
                trainer.save_checkpoint(other.run.checkpoints / "foreign")

    first = train(SaveElsewhere())
    resumed = train(resume_from=other.run.checkpoints / "foreign")
    assert (other.run.path / "metrics.jsonl").read_bytes() == before
    assert resumed.run.id not in (other.run.id, first.run.id)
    assert same(weights(resumed.model), weights(first.model))


def test_a_hook_state_that_cannot_be_saved_is_the_failure_of_its_hook(tmp_path, caplog):
    class Queue(Counter):
        def state_dict(self):
            return {"steps": object()} if self.steps > 2 else {"steps": self.steps}

    hooks = [SaveAt(2), SaveAt(4), Queue(), Counter()]
    trainer = Trainer(settings(tmp_path), *make(), hooks=hooks)
    trainer.fit(batches(5))
    assert trainer.status == "completed"
    run = hookline.open_run(trainer.run.path)
    assert [saved.step for saved in run.checkpoints()] == [2, 4]
    assert "hooks['queue']['steps'] is a object, which cannot be saved" in caplog.text
    resumed = Trainer(settings(tmp_path), *make(), hooks=[SaveAt(9), SaveAt(9), Queue(), Counter()])
    resumed.fit(batches(5), resume_from=run.path)
    assert resumed.hooks.get_hook("counter").steps == 5


@pytest.mark.parametrize(
    ("changed", "lr", "message"),
    [
        ({"accumulate": 2}, 0.1, "Used from now on: accumulate is 2 instead of 1."),
        ({"clip_norm": 0.5}, 0.1, "Used from now on: clip_norm is 0.5 instead of None."),
        ({}, 0.5, "because the checkpoint's are restored: optimizers.0.groups.0.lr is 0.5 instead"),
        ({"seed": 2}, 0.1, "because the checkpoint's are restored: seed is 2 instead of 1."),
        ({"max_steps": 9, "progress": "off"}, 0.1, None),
    ],
)
def test_settings_that_differ_from_the_checkpoint_are_said(tmp_path, caplog, changed, lr, message):
    def make(lr: float = 0.1, steps: int = 2, **fields: Any) -> Trainer:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        config = {"max_steps": steps, "runs": None, "progress": "off", "seed": 1, **fields}
        loss_fn = nn.functional.mse_loss
        return Trainer(TrainerConfig(**config), model, optimizer, scheduler, loss_fn=loss_fn)

    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer = make().fit(DataLoader(data, batch_size=4))
    trainer.save_checkpoint(tmp_path / "first")
    trainer = make(lr, **{"steps": 4, **changed} if "max_steps" not in changed else changed)
    trainer.fit(DataLoader(data, batch_size=4), resume_from=tmp_path / "first")
    said = [text for text in caplog.messages if "settings differ" in text]
    assert len(said) == (message is not None)
    assert message is None or message in said[0]
    caplog.clear()
    # The learning rate in force is still the first one, also in the next checkpoint.
    trainer.save_checkpoint(tmp_path / "second")
    make(steps=9, **{k: v for k, v in changed.items() if k not in ("max_steps", "seed")}).fit(
        DataLoader(data, batch_size=4), resume_from=tmp_path / "second"
    )
    assert not [text for text in caplog.messages if "settings differ" in text]
