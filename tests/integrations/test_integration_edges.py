"""Losses, metrics and starts in Lightning, Ignite and Accelerate, where they are easily wrong."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from ignite.engine import Engine
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline


class Losses(hookline.Hook):
    """Notes the losses of steps and batches, and the metrics of batches."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.batches: list[float] = []
        self.metrics: list[list[str]] = []

    def on_train_batch_end(self, loss, metrics):
        self.batches.append(loss)
        self.metrics.append(sorted(metrics))

    def on_step_end(self, loss):
        self.steps.append(loss)


class StepLosses(hookline.Hook):
    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_end(self, loss):
        self.steps.append(loss)


def rows(n: int) -> torch.Tensor:
    return torch.randn(n * 4, 4, generator=torch.Generator().manual_seed(3))


def loader(n: int) -> DataLoader[Any]:
    return DataLoader(rows(n), batch_size=4)  # type: ignore[arg-type]


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.critic = nn.Linear(4, 1), nn.Linear(4, 1)
        self.lr = 0.1
        self.own: list[float] = []

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch), batch.sum(1, keepdim=True))
        self.own.append(loss.item())
        return loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.log("first", 1.0)
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


class ManualAccumulation(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss_of(batch) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Adversarial(Regression):
    """A critic whose loss is a mean of two, as usual; nothing is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss_of(batch))
        first.step()
        second.zero_grad()
        loss = (self.critic(batch).pow(2).mean() + self.critic(batch).abs().mean()) / 2
        self.own.append(loss.item())
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self) -> Any:
        parts = (self.net, self.critic)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


def make_trainer() -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def pairs(values: list[float]) -> list[float]:
    return [sum(values[i : i + 2]) / 2 for i in range(0, len(values), 2)]


@pytest.mark.parametrize("kind", [ManualAccumulation, Adversarial])
def test_losses_of_manual_optimization_are_those_of_the_batches(kind):
    module, losses, trainer = kind(), Losses(), make_trainer()
    hookline.attach(trainer, hooks=[losses])
    trainer.fit(module, loader(4))
    assert losses.steps == pytest.approx(pairs(module.own))
    if kind is ManualAccumulation:
        assert losses.batches == pytest.approx(module.own)


@pytest.mark.parametrize("has_run", [False, True])
def test_metrics_of_a_batch_are_those_that_it_has_logged(tmp_path, has_run):
    losses, trainer = Losses(), make_trainer()
    hookline.attach(trainer, hooks=[losses], runs=tmp_path if has_run else None)
    trainer.fit(Regression(), loader(3))
    assert losses.metrics == [["first", "loss"], ["loss"], ["loss"]]


def test_a_search_for_a_learning_rate_is_no_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Lightning saves a checkpoint there
    losses, module, trainer = Losses(), Regression(), make_trainer()
    hookline.attach(trainer, hooks=[losses])
    Tuner(trainer).lr_find(module, loader(4), num_training=3, update_attr=False)
    assert losses.steps == []
    trainer.fit(module, loader(2))
    assert len(losses.steps) == 2


def test_two_optimizers_that_step_in_turn_do_not_share_a_division():
    torch.manual_seed(0)
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    own: list[float] = []

    def train_step(engine: Engine, batch: torch.Tensor) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(batch).pow(2).mean() + model(batch).abs().mean()) / 2
            own.append(loss.item())
            loss.backward()
            optimizer.step()

    losses, engine = StepLosses(), Engine(train_step)
    hookline.attach(engine, model=list(models), optimizer=optimizers, hooks=[losses])
    engine.run(loader(3), max_epochs=1)
    assert losses.steps == pytest.approx(pairs(own))


def test_an_engine_that_fails_before_it_starts_can_run_again():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(engine: Engine, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()

    losses, engine = StepLosses(), Engine(train_step)
    session = hookline.attach(engine, model=model, optimizer=optimizer, hooks=[losses])
    with pytest.raises(ValueError, match="epoch_length"):
        engine.run(max_epochs=1)
    engine.run(loader(3), max_epochs=1)
    assert len(losses.steps) == 3
    assert session.status == "completed"
    assert "run" not in vars(engine)


@pytest.mark.parametrize(("batches", "accumulate"), [(1, 2), (3, 4), (5, 2)])
def test_accelerates_division_is_undone_in_steps_with_fewer_batches(batches, accumulate):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    x = rows(batches)
    model = nn.Linear(4, 1)
    model, optimizer, data = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4),
    )
    losses, own = StepLosses(), []
    with hookline.attach(accelerator, model=model, optimizer=optimizer, hooks=[losses]):
        for _ in range(2):
            for inputs, targets in data:
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(inputs), targets)
                    own.append(loss.item())
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
    epochs = own[:batches], own[batches:]
    groups = [e[i : i + accumulate] for e in epochs for i in range(0, batches, accumulate)]
    assert losses.steps == pytest.approx([sum(group) / len(group) for group in groups])
