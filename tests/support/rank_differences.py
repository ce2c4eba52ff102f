"""Trainings of two processes that are not alike, for `test_rank_differences.py`."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import distributed_training as shared
import torch
import torch.distributed as dist
from distributed_training import RANK, loaders, make
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hookline
from hookline import ModelCheckpoint, Trainer, TrainerConfig


def train(model: nn.Module, step_fn: Any, optimizers: Any = None, **fields: Any) -> Trainer:
    settings = {"max_epochs": 1, "seed": 3, "progress": "off", "runs": None, **fields}
    optimizers = optimizers or torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(TrainerConfig(**settings), model, optimizers, step_fn=step_fn)


def weights_are_equal(trainer: Trainer) -> bool:
    """Whether both processes have the same finite weights and buffers."""
    values = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, values)
    finite = all(value.isfinite().all() for value in trainer.model.state_dict().values())
    return bool(both[0] == both[1] and finite)


def metrics(folder: Path) -> dict[str, Any]:
    """Only rank 1 returns a further metric."""

    def step_fn(model: Any, batch: Any) -> Any:
        loss = mse_loss(model(batch[0]), batch[1])
        losses.append(loss.item())
        return {"loss": loss, **({"accuracy": 100.0} if RANK == 1 else {})}

    losses: list[float] = []
    trainer = train(nn.Linear(8, 4), step_fn, runs=folder)
    trainer.fit(loaders()[0])
    return {"losses": losses}


def non_finite(folder: Path) -> dict[str, Any]:
    """A loss of rank 1 is NaN while the second optimizer waits for its step."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hookline").addHandler(handler)
    model, batches = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), iter(range(100))

    def step_fn(model: Any, batch: Any) -> Any:
        loss = mse_loss(model(batch[0]), batch[1])
        return loss * float("nan") if RANK == 1 and next(batches) == 1 else loss

    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    trainer = train(model, step_fn, optimizers, on_nan="skip", optimizer_every=[1, 3])
    trainer.fit(loaders()[0])
    return {"equal": weights_are_equal(trainer), "steps": trainer.step, "lines": lines}


def buffers(folder: Path) -> dict[str, Any]:
    """Batch norms have other running means in each process; rank 0's are those that are saved."""
    results: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(RANK)  # DDP and FSDP2 use the weights of rank 0
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        trainer = train(model, None, strategy=strategy)
        trainer.loss_fn = mse_loss
        validated = [trainer.validate(loaders()[1])["val/loss"]]
        trainer.fit(*loaders())
        validated.append(trainer.validate(loaders()[1])["val/loss"])
        path = trainer.save_checkpoint(folder / strategy)
        means = model[1].running_mean
        results[strategy] = {"validated": validated, "means": means.tolist(), "path": str(path)}
    return results


class Centered(nn.Module):
    """Subtracts a running mean in training, so that the buffer of a process matters for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 4), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("constant", torch.full((3,), float(RANK)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.linear(self.drop(x - self.mean))


def used_buffers(folder: Path) -> dict[str, Any]:
    """Buffers that training reads, saved between validations, and a run that is resumed there."""
    results: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        ends: list[Any] = []
        for start in (None, folder / strategy / "epoch=0-step=3"):
            torch.manual_seed(0)
            trainer = train(Centered(), None, max_steps=6, accumulate=2, strategy=strategy)
            trainer.loss_fn = mse_loss
            trainer.add_hook(ModelCheckpoint(-1, every_n_steps=3, folder=folder / strategy))
            trainer.fit(loaders()[0], resume_from=start)
            state = trainer.model.state_dict()
            ends.append({name: shared.weights(trainer)[name] for name in state})
        hooks = len(trainer.model._forward_pre_hooks)
        results[strategy] = {"whole": ends[0], "resumed": ends[1], "hooks": hooks}
    return results


class Scaled(nn.Linear):
    """Has a scalar parameter."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


def unsupported(folder: Path) -> dict[str, Any]:
    """A scalar parameter with FSDP2, and a step_fn that reads an attribute of the DDP wrapper."""
    errors: dict[str, Any] = {}
    try:
        train(Scaled(), None, strategy="fsdp")
    except hookline.TrainingError as error:
        errors["scalar"] = str(error)
    trainer = train(nn.Linear(8, 4), uses_wrapper, strategy="ddp")
    trainer.fit(loaders()[0])
    return {**errors, "status": trainer.status}


def uses_wrapper(model: Any, batch: Any) -> torch.Tensor:
    assert model.device_ids is None  # an attribute of the wrapper
    return mse_loss(model(batch[0]), batch[1])


class Seen(hookline.Hook):
    """Keeps the numbers of the samples that this process trains on, and its validation batches."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.batches: list[str] = []

    def on_train_batch_start(self, batch: Any) -> None:
        self.samples += [int(one) for one in batch[0][:, 0]]

    def on_validation_batch_end(self, dataloader_name: str, batch_idx: int) -> None:
        self.batches.append(f"{dataloader_name}{batch_idx}")


class LateSampler:
    """Draws random numbers for every batch."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        left = list(range(40))
        for _ in range(8):
            random.shuffle(left)
            yield left[:5]
            left = left[5:]


class Shuffled(IterableDataset[Any]):
    """Draws a random number for every sample."""

    def __iter__(self) -> Any:
        left = torch.arange(40.0)
        while len(left):
            left = left[torch.randperm(len(left))]
            yield left[0].repeat(8), torch.zeros(4)
            left = left[1:]


def late_order(folder: Path) -> dict[str, Any]:
    """Loaders whose order is drawn during the epoch, while dropout draws other random numbers."""
    data = TensorDataset(torch.arange(40.0).repeat(8, 1).T, torch.zeros(40, 4))
    sources = {
        "sampler": DataLoader(data, batch_sampler=LateSampler()),
        "iterable": DataLoader(Shuffled(), batch_size=5),
    }
    results: dict[str, Any] = {}
    for name, loader in sources.items():
        trainer, _ = make(None, dropout=0.3, max_epochs=1)
        trainer.add_hook(seen := Seen())
        trainer.fit(loader)
        results[name] = seen.samples
    return results


def few_batches(folder: Path) -> dict[str, Any]:
    """Validation loaders with fewer batches than processes, and one that rank 0 has nothing of."""
    results: dict[str, Any] = {}
    data = loaders()[1].dataset
    for strategy in ("ddp", "fsdp"):
        trainer, _ = make(None, max_epochs=1, strategy=strategy)
        trainer.add_hook(seen := Seen())
        val = {"a": DataLoader(data, batch_size=11), "b": DataLoader(data, batch_size=33)}
        trainer.fit(loaders()[0], {**val, "c": DataLoader(data, batch_size=8)})
        results[strategy] = {"batches": seen.batches}
        trainer, _ = make(None, max_epochs=1, strategy=strategy, shard_loaders=False)
        empty = DataLoader(TensorDataset(torch.zeros(0, 8), torch.zeros(0, 4)))
        trainer.fit(loaders()[0], val["a"] if RANK else empty)
        results[strategy]["uneven"] = trainer.validate()["val/loss"]
    return results


def differences(folder: Path) -> dict[str, Any]:
    """Settings, hooks, optimizers and loaders of rank 1 differ: an error in both processes."""

    class Extra(hookline.Hook):
        def on_step_end(self) -> None: ...

    messages: dict[str, Any] = {}
    for name in ("hooks", "settings", "optimizers", "loaders"):
        other = RANK == 1
        trainer, _ = make(None, accumulate=2 if other and name == "settings" else 1)
        if other and name == "hooks":
            trainer.add_hook(Extra())
        if other and name == "optimizers":
            trainer.optimizers[0].param_groups[0]["lr"] = 0.5
        train_loader, val_loader = loaders()
        try:
            trainer.fit(train_loader, None if other and name == "loaders" else val_loader)
        except hookline.TrainingError as error:
            messages[name] = str(error)
    return messages


class OnMain(hookline.Hook):
    """Does in rank 0 what all processes have to do, or what one may ask for."""

    ranks = "main"

    def __init__(self, folder: Path) -> None:
        self._folder, self._saves = folder, 0

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if step == 2:
            trainer.validate()

    def on_checkpoint_save(self, trainer: Trainer) -> None:
        if self._saves < 2:
            self._saves += 1
            trainer.save_checkpoint(self._folder / f"copy_{self._saves}")


def on_main(folder: Path) -> dict[str, Any]:
    """Hooks of rank 0 that validate, save at the end of an epoch, and change a metric."""

    class Changes(hookline.Hook):
        ranks, intervenes = "main", True

        def on_epoch_end(self, metrics: Any) -> None:
            metrics["val/loss"] = 5.0

    trainer, _ = make(folder, max_epochs=4)
    trainer.schedulers = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizers[0], patience=0)
    ]
    hooks = (OnMain(folder), Changes(), ModelCheckpoint(every_n_epochs=1))
    for hook in hooks:
        trainer.add_hook(hook)
    trainer.fit(*loaders())
    errors = [info.last_error for info in trainer.hooks.describe() if info.failures]
    copies = [(folder / f"copy_{i}" / "manifest.json").exists() for i in (1, 2)]
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    return {"errors": errors, "copies": copies, "lr": lr, "equal": weights_are_equal(trainer)}


def late_update(folder: Path) -> dict[str, Any]:
    """A hook of rank 1 adds an update while training runs."""

    class Adds(hookline.Hook):
        intervenes = True

        def on_step_end(self, trainer: Trainer, step: int) -> None:
            if RANK == 1 and step == 3:
                trainer.add_hook(hookline.Noise())

    trainer, _ = make(None, max_epochs=1)
    trainer.add_hook(Adds())
    try:
        trainer.fit(loaders()[0])
    except hookline.LoopError as error:
        return {"error": str(error), "steps": trainer.step}
    return {}


def not_called(folder: Path) -> dict[str, Any]:
    """A loss that is computed with the model itself, whose gradients nobody would average."""
    errors: dict[str, Any] = {}
    for strategy in ("ddp", "accelerate"):
        model = nn.Linear(8, 4)

        def step_fn(_: Any, batch: Any, model: nn.Module = model) -> Any:
            return mse_loss(model(batch[0]), batch[1])

        trainer = train(model, step_fn, strategy=strategy)
        try:
            trainer.fit(loaders()[0])
        except hookline.TrainingError as error:
            errors[strategy] = str(error)
    return errors


def unused(folder: Path) -> dict[str, Any]:
    """A parameter that the model does not use."""
    model: Any = nn.Linear(8, 4)
    model.extra = nn.Parameter(torch.ones(3))
    trainer = train(model, None, strategy="ddp", ddp={"find_unused_parameters": True})
    trainer.loss_fn = mse_loss
    trainer.fit(loaders()[0])
    return {"status": trainer.status, "equal": weights_are_equal(trainer)}


if __name__ == "__main__":
    for name in ("metrics", "non_finite", "buffers", "differences", "on_main", "not_called"):
        setattr(shared, name, globals()[name])
    for name in ("unused", "late_order", "few_batches", "late_update", "used_buffers"):
        setattr(shared, name, globals()[name])
    for name in ("unsupported",):
        setattr(shared, name, globals()[name])
    shared.main()
