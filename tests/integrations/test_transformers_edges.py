"""Hooks in a Hugging Face Trainer, where training does not go as usual."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hookline
from hookline.errors import LoopError


def make_data(n: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 50, (8,), generator=generator) for _ in range(n)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def make_trainer(
    folder: Path, *, data: Any = None, callbacks: Any = None, kind: Any = Trainer, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(
        GPT2LMHeadModel(config),
        TrainingArguments(str(folder / "output"), **{**defaults, **options}),
        train_dataset=make_data() if data is None else data,
        eval_dataset=make_data(2),
        callbacks=callbacks,
    )


class Watch(hookline.Hook):
    """Notes where training is, and counts its steps."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []
        self.steps = 0

    def on_train_start(self):
        self.events.append("train")

    def on_epoch_start(self, epoch):
        self.events.append(f"epoch {epoch}")

    def on_train_batch_start(self, batch_idx):
        self.events.append(f"batch {batch_idx}")

    def on_step_end(self, loss, epoch):
        self.losses.append(loss)
        self.steps += 1

    def on_validation_start(self, epoch, tokens_seen):
        self.events.append(f"validation in {epoch} after {tokens_seen}")

    def on_epoch_end(self, epoch):
        self.events.append(f"epoch {epoch} ends")

    def on_checkpoint_load(self, step):
        self.events.append(f"loaded {step}")

    def on_train_end(self, status):
        self.events.append(status)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Endless(IterableDataset[Any]):
    """A stream of five rows, whose length is not known."""

    def __iter__(self):
        yield from make_data(5)


def test_a_stream_that_ends_within_a_step_counts_epochs_and_losses(tmp_path):
    watch = Watch()
    trainer = make_trainer(tmp_path, data=Endless(), gradient_accumulation_steps=2)
    hookline.attach(trainer, hooks=[watch])
    trainer.train()
    assert [name for name in watch.events if name.startswith("epoch")] == [
        "epoch 0",
        "epoch 0 ends",
        "epoch 1",
        "epoch 1 ends",
    ]
    # The trainer logs 6.8 for the third step: it adds the loss of the batch that was left over.
    assert all(3 < loss < 4 for loss in watch.losses)


def test_an_epoch_that_a_callback_ends_is_followed_by_the_next_one(tmp_path):
    class EndEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 2 == 0

    watch = Watch()
    trainer = make_trainer(tmp_path, callbacks=[EndEpoch()], max_steps=-1, num_train_epochs=3)
    hookline.attach(trainer, hooks=[watch])
    trainer.train()
    epochs = [name for name in watch.events if name.startswith("epoch") and "ends" not in name]
    assert epochs == ["epoch 0", "epoch 1", "epoch 2"]


def test_what_hooks_log_after_a_validation_and_an_epoch_has_the_trainers_step(tmp_path):
    class Log(hookline.Hook):
        def on_validation_end(self, trainer, step):
            trainer.log("own/validation", step)

        def on_epoch_end(self, trainer, step):
            trainer.log("own/epoch", step)

    class Logger(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            own = {name: value for name, value in logs.items() if name.startswith("own")}
            found.extend((name, value, state.global_step) for name, value in own.items())

    found: list[Any] = []
    trainer = make_trainer(
        tmp_path, callbacks=[Logger()], eval_strategy="steps", eval_steps=2, max_steps=4
    )
    hookline.attach(trainer, hooks=[Log()], runs=tmp_path / "runs")
    trainer.train()
    assert found == [("own/validation", 2, 2), ("own/validation", 4, 4), ("own/epoch", 4, 4)]


def test_a_training_that_fails_before_it_starts_can_be_repeated(tmp_path):
    watch = Watch()
    trainer = make_trainer(tmp_path, max_steps=1)
    session = hookline.attach(trainer, hooks=[watch])
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    assert watch.events == ["train", "epoch 0", "batch 0", "epoch 0 ends", "completed"]
    assert session.step == 1


def test_hooks_are_attached_again_for_another_training(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    hookline.attach(trainer, hooks=[Watch()])
    trainer.train()
    again = Watch()
    hookline.attach(trainer, hooks=[again])
    trainer.train()
    assert again.steps == 1


def test_the_states_of_two_sessions_do_not_collide(tmp_path, caplog):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    hookline.attach(trainer, hooks=[Watch()])
    hookline.attach(trainer, hooks=[hookline.EMA(), Watch()])
    trainer.train()
    trainer, first, second = make_trainer(tmp_path, max_steps=5), Watch(), Watch()
    hookline.attach(trainer, hooks=[first])
    hookline.attach(trainer, hooks=[hookline.EMA(), second])
    with caplog.at_level(logging.WARNING, "hookline"):
        last = hookline.get_last_checkpoint(tmp_path / "output")
        assert last is not None
        trainer.train(resume_from_checkpoint=str(last))
    assert (first.steps, second.steps) == (5, 5)
    assert not [record for record in caplog.records if record.name == "hookline"]


class FindsCheckpoint(Trainer):
    """Finds the checkpoint itself."""

    def train(self, folder: str) -> Any:  # type: ignore[override]
        return super().train(resume_from_checkpoint=folder)


def test_the_checkpoint_that_was_loaded_is_known(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    hookline.attach(trainer, hooks=[Watch()])
    trainer.train()
    (tmp_path / "output").rename(tmp_path / "moved")
    watch = Watch()
    trainer = make_trainer(tmp_path, kind=FindsCheckpoint)
    hookline.attach(trainer, hooks=[watch])
    trainer.train(str(tmp_path / "moved" / "checkpoint-2"))
    assert watch.events[:3] == ["train", "loaded 2", "epoch 0"]
    assert watch.steps == 4


def test_a_validation_before_the_first_step_is_in_the_first_epoch(tmp_path):
    watch = Watch()
    trainer = make_trainer(tmp_path, eval_on_start=True, eval_strategy="epoch", max_steps=1)
    hookline.attach(trainer, hooks=[watch])
    trainer.train()
    assert watch.events[1:3] == ["validation in 0 after 0", "epoch 0"]
    assert "validation in 0 after 8" in watch.events


def test_a_session_that_was_detached_fires_no_more_events(tmp_path):
    class Detach(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            session.detach()

    watch = Watch()
    trainer = make_trainer(tmp_path, data=make_data(2), eval_strategy="epoch", max_steps=4)
    session = hookline.attach(trainer, hooks=[watch])
    trainer.add_callback(Detach())
    trainer.train()
    assert watch.events == ["train", "epoch 0", "batch 0", "completed"]
    assert trainer.state.global_step == 4


def test_an_epoch_ends_if_another_callback_prevents_its_validation(tmp_path):
    class Prevent(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_evaluate = False

    watch = Watch()
    trainer = make_trainer(tmp_path, data=make_data(1), eval_strategy="epoch", max_steps=2)
    hookline.attach(trainer, hooks=[watch])
    trainer.add_callback(Prevent())
    trainer.train()
    assert watch.events[3:5] == ["epoch 0 ends", "epoch 1"]
    assert watch.events[-2:] == ["epoch 1 ends", "completed"]


def test_a_search_for_hyperparameters_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    hookline.attach(trainer, hooks=[Watch()])
    with pytest.raises(LoopError, match="hyperparameter_search starts training several times"):
        trainer.train(trial={"learning_rate": 0.1})
