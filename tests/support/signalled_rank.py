"""Run by `torchrun` with two ranks: rank 1 alone gets SIGTERM, and rank 0 waits for copies."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_checks import check_in_all_ranks
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hookline

FOLDER = Path(sys.argv[1])
SAVING = {"grace_seconds": 2.0}


class Stalled:
    """A storage that never answers."""

    def upload(self, bundle: Any, under: str, is_stopped: Any) -> str:
        threading.Event().wait()
        return "nowhere"


class Signalled(hookline.Hook):
    def on_step_end(self, step: int) -> None:
        if step == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def make_hooks() -> list[hookline.Hook]:
    upload = hookline.UploadHook(FOLDER / "copies", timeout=60.0)
    upload._destination = Stalled()  # type: ignore[assignment]
    return [Signalled(), hookline.ModelCheckpoint(every_n_steps=2), upload]


def check_messages(messages: Messages) -> None:
    said = [text for text in messages.texts if "because a signal has ended training" in text]
    assert len(said) == (dist.get_rank() == 0), messages.texts
    messages.texts.clear()


def train_with_the_trainer() -> None:
    model = torch.nn.Linear(2, 1)
    config = hookline.TrainerConfig(runs=FOLDER / "own", checkpoints=SAVING, progress=False)
    trainer = hookline.Trainer(
        config,
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        step_fn=lambda called, batch: called(batch).square().mean(),
        hooks=make_hooks(),
    )
    trainer.fit([torch.ones(2, 2)] * 40)
    assert trainer.status == "preempted"
    check_messages(MESSAGES)


def train_with_hugging_face() -> None:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 4, "vocab_size": 8, "n_positions": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(str(FOLDER / "output"), max_steps=40, **options)
    ids = torch.arange(4)
    trainer = Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 64)
    session = hookline.attach(
        trainer, hooks=make_hooks(), runs=FOLDER / "attached", checkpoints=SAVING
    )
    trainer.train()
    assert session.status == "preempted"
    check_messages(MESSAGES)


if __name__ == "__main__":
    MESSAGES = Messages()
    logging.getLogger("hookline").addHandler(MESSAGES)
    check_in_all_ranks(train_with_the_trainer, train_with_hugging_face)
