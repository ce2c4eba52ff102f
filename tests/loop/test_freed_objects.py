"""After a session, models, optimizers and trainers are freed as soon as nobody refers to them."""

from __future__ import annotations

import gc
import logging
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from ignite.engine import Engine
from loops import batches, make, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import hookline


class Sees(hookline.Hook):
    """Uses what a session watches: forwards, gradients, clips, steps; and saves a checkpoint."""

    def on_train_start(self, model): ...

    def on_after_forward(self, outputs): ...

    def on_gradients_ready(self): ...

    def on_step_end(self, trainer, step, loss, grad_norm, state):
        trainer.log("own/loss", loss)
        if step == 2 and trainer.run is not None:
            trainer.save_checkpoint()


def train_bare(hooks: list[Any], runs: Any, folder: Path) -> list[Any]:
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=hooks, runs=runs):
        for x, y in batches(3):
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [model, optimizer]


def train_bare_and_detach(hooks: list[Any], runs: Any, folder: Path) -> list[Any]:
    model, optimizer = make()
    session = hookline.attach(model, optimizer, hooks=hooks, runs=runs)
    train(model, optimizer, batches(3))
    session.detach()
    return [model, optimizer]


def train_with_ignite(hooks: list[Any], runs: Any, folder: Path) -> list[Any]:
    model, optimizer = make()

    def step(engine: Engine, batch: Any) -> float:
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def validate(engine: Engine, batch: Any) -> float:
        return F.mse_loss(model(batch[0]), batch[1]).item()

    engine, evaluator = Engine(step), Engine(validate)
    hookline.attach(
        engine, model=model, optimizer=optimizer, evaluator=evaluator, hooks=hooks, runs=runs
    )
    engine.run(batches(3))
    return [engine, evaluator, model, optimizer]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make()[0]

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.mse_loss(self.net(x), labels)}


def train_with_hugging_face(hooks: list[Any], runs: Any, folder: Path) -> list[Any]:
    samples = [{"x": x, "labels": y} for xs, ys in batches(3) for x, y in zip(xs, ys, strict=True)]
    args = TrainingArguments(
        str(folder / "out"),
        max_steps=3,
        per_device_train_batch_size=len(samples) // 3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(Regression(), args, train_dataset=samples)
    hookline.attach(trainer, hooks=hooks, runs=runs)
    trainer.train()
    return [trainer, trainer.model, trainer.optimizer.optimizer]


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make()[0]

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_lightning(hooks: list[Any], runs: Any, folder: Path) -> list[Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", enable_model_summary=False, log_every_n_steps=1, **options
    )
    module, (x, y) = Module(), batches(1)[0]
    hookline.attach(trainer, hooks=hooks, runs=runs)
    trainer.fit(module, DataLoader(TensorDataset(x.repeat(3, 1), y.repeat(3, 1)), len(x)))
    return [trainer, module, trainer.optimizers[0]]


LOOPS: dict[str, Callable[[list[Any], Any, Path], list[Any]]] = {
    "bare loop": train_bare,
    "bare loop without `with`": train_bare_and_detach,
    "ignite": train_with_ignite,
    "hugging face": train_with_hugging_face,
}


@pytest.fixture
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_gc")
@pytest.mark.parametrize("loop", LOOPS)
def test_everything_is_freed_without_the_garbage_collector(loop, tmp_path):
    found = LOOPS[loop]([Sees()], tmp_path / "runs", tmp_path)
    references = [weakref.ref(each) for each in found]
    del found
    assert [reference() for reference in references] == [None] * len(references)


def test_everything_of_lightning_is_freed_by_the_garbage_collector(tmp_path):
    found = train_with_lightning([Sees()], tmp_path / "runs", tmp_path)  # it has cycles of its own
    references = [weakref.ref(each) for each in found]
    del found
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.usefixtures("_without_gc")
def test_everything_is_freed_after_an_error(tmp_path):
    references: list[Any] = []

    def fail() -> None:
        model, optimizer = make()
        references.extend([weakref.ref(model), weakref.ref(optimizer)])
        with hookline.attach(model, optimizer, hooks=[Sees()], runs=tmp_path):
            train(model, optimizer, batches(1))
            raise ValueError("of the loop")

    with suppress(ValueError):  # `pytest.raises` would keep its frames
        fail()
    assert [reference() for reference in references] == [None, None]


def test_sessions_that_are_freed_without_detaching_leave_no_handler_of_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(3):
        model, optimizer = make()
        hookline.attach(model, optimizer, hooks=[Sees()])
        train(model, optimizer, batches(1))
        del model, optimizer
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_a_session_has_is_there_while_somebody_has_the_session(tmp_path):
    def make_session() -> Any:
        model, optimizer = make()
        with hookline.attach(model, optimizer, hooks=[Sees()], runs=tmp_path) as session:
            train(model, optimizer, batches(1))
        return session

    session = make_session()
    assert isinstance(session.model(batches(1)[0][0]), torch.Tensor)
    path = session.save_checkpoint(tmp_path / "saved")
    assert path is not None
    assert (path / "model.safetensors").is_file()
    x, y = batches(1)[0]
    session.backward(F.mse_loss(session.model(x), y))  # a loop may go on without its hooks
    session.updates()
    session.log("loss", 1.0)
    assert session.step == 1
