"""Trackers in other libraries' trainers and in a bare loop: interrupted, resumed, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hookline
from hookline.runs.jsonl_reader import read_records


class Fail(hookline.Hook):
    """Ends training after step 3."""

    critical = True

    def on_step_end(self, step):
        if step == 3:
            raise RuntimeError("broken")


def read_scalars(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return what TensorBoard's reader has, by name."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def read_record(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the run's own record, by name."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for record in read_records(folder / "metrics.jsonl"):
        found.setdefault(record["name"], []).append((record["step"], record["value"]))
    return found


def check_tracked(runs: Path, steps: int) -> None:
    """Check that there is one run, and that TensorBoard has its record and nothing else."""
    (folder,) = runs.iterdir()
    record = read_record(folder)
    assert [step for step, _ in record["train/loss"]] == list(range(1, steps + 1))
    assert read_scalars(folder / "tensorboard") == record
    assert len(list((folder / "tensorboard").iterdir())) == 2  # a file of each part
    manifest = hookline.open_run(folder).manifest
    assert manifest["trackers"] == {"tensorboard": {"folder": "tensorboard"}}


def test_a_hugging_face_trainer_has_trackers_beside_its_own_loggers(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "theirs"))

    def start(*hooks):
        torch.manual_seed(0)
        sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
        ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        sequences = torch.randint(0, 20, (12, 4))
        trainer = Trainer(
            GPT2LMHeadModel(GPT2Config(vocab_size=20, **sizes, **ids)),
            TrainingArguments(
                str(tmp_path / "out"),
                per_device_train_batch_size=2,
                num_train_epochs=1,
                logging_steps=1,
                save_steps=2,
                report_to=["tensorboard"],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": ids, "labels": ids.clone()} for ids in sequences],
        )
        runs = tmp_path / "runs"
        hookline.attach(trainer, hooks=hooks, trackers=["tensorboard"], runs=runs)
        return trainer

    with pytest.raises(hookline.HookFailedError):
        start(Fail()).train()
    start().train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    check_tracked(tmp_path / "runs", 6)
    theirs = read_scalars(tmp_path / "theirs")["train/loss"]
    assert [step for step, _ in theirs][-4:] == [3, 4, 5, 6]


def test_a_bare_loop_has_trackers(tmp_path):
    def train(checkpoint=None, end=6):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        runs = tmp_path / "runs"
        session = hookline.attach(model, optimizer, trackers=["tensorboard"], runs=runs)
        if checkpoint is not None:
            session.load_checkpoint(checkpoint)
        with session:
            while session.step < end:
                model(torch.ones(1, 2)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if session.step == 2:
                    session.save_checkpoint(wait=True)

    train(end=3)
    train(next((tmp_path / "runs").glob("*/checkpoints/step_000002")))
    check_tracked(tmp_path / "runs", 6)
