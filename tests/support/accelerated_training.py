"""Trainings with Accelerate in two processes, started by `test_accelerate_strategy.py`.

Each function is one training or several; what they return in each rank is written as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from distributed_training import (
    RANK,
    Numbers,
    Once,
    Watch,
    decide,
    describe,
    loaders,
    resume,
    train,
)
from torch import nn
from torch.utils.data import DataLoader

import hookline
from hookline import AccelerateTrainer, ModelCheckpoint, Trainer, TrainerConfig, TrainingError

__all__ = ["decide", "resume", "train"]


class SyncWatch(hookline.Hook):
    """Keeps `sync_gradients` before each forward, and the gradient after each backward."""

    def __init__(self) -> None:
        self.sync: list[bool] = []
        self.gradients: list[float] = []

    def on_before_forward(self, trainer: Trainer) -> None:
        self.sync.append(trainer.accelerator is None or trainer.accelerator.sync_gradients)

    def on_after_backward(self, model: nn.Module) -> None:
        gradient = next(model.parameters()).grad  # FSDP2 has none before it is reduced
        self.gradients.append(0.0 if gradient is None else gradient.sum().item())


class Lengths(hookline.Hook):
    """Gathers the targets of a validation from all processes."""

    def __init__(self) -> None:
        self.samples = 0

    def on_validation_batch_end(self, trainer: Trainer, batch: Any) -> None:
        self.samples += len(trainer.accelerator.gather_for_metrics(batch[1]))


class Counter:
    """An object that is registered with the Accelerator."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Counting(hookline.Hook):
    """Counts steps in an object that is registered with the Accelerator."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def on_step_end(self) -> None:
        self.counter.value += 1


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4)


def make(
    folder: Path | None, model: Any, optimizer: Any, scheduler: Any = None, **more: Any
) -> Any:
    accelerator = more.pop("accelerator", None)
    settings = {"max_epochs": 1, "seed": 3, "clip_norm": 0.5, "progress": "off", "runs": folder}
    kind: Any = Trainer if more.get("strategy", "accelerate") != "accelerate" else AccelerateTrainer
    own = {} if accelerator is None else {"accelerator": accelerator}
    loss_fn, watch = nn.functional.mse_loss, Watch()
    config = TrainerConfig(**(settings | more))
    trainer = kind(config, model, optimizer, scheduler, loss_fn=loss_fn, hooks=[watch], **own)
    return trainer, watch


def accumulate(folder: Path) -> dict[str, Any]:
    """Gradients are reduced once per step, also if the epoch ends within a step."""
    results: dict[str, Any] = {}
    stream = DataLoader(Numbers(28), batch_size=2)  # 7 batches in each process
    for strategy in ("accelerate", "ddp"):
        for name, data in {"known": loaders(70)[0], "streamed": stream}.items():
            model, optimizer, _ = parts()
            trainer, watch = make(None, model, optimizer, strategy=strategy, accumulate=3)
            sync = SyncWatch()
            trainer.add_hook(sync)
            trainer.fit(data)
            results[f"{strategy} {name}"] = {**describe(trainer, watch), **vars(sync)}
    return results


def prepared(folder: Path) -> dict[str, Any]:
    """Everything is prepared by the user, with an Accelerator of the user's own."""
    results: dict[str, Any] = {}
    for name, limits in {"whole": [12], "parts": [4, 12]}.items():
        for limit in limits:
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model, optimizer, scheduler, train_loader, val_loader = accelerator.prepare(
                *parts(), *loaders()
            )
            counter = Counter()
            accelerator.register_for_checkpointing(counter)
            options = {"accelerator": accelerator, "max_steps": limit, "max_epochs": None}
            trainer, watch = make(folder / name, model, optimizer, scheduler, **options)
            lengths = Lengths()
            for hook in (ModelCheckpoint(every_n_steps=4), lengths, Counting(counter)):
                trainer.add_hook(hook)
            resumed = limit == 12 and len(limits) > 1
            found = sorted((folder / name).glob("2*"))[0] if resumed else None
            trainer.fit(train_loader, val_loader, resume_from=found)
        results[name] = {
            **describe(trainer, watch),
            "accumulate": trainer.config.accumulate,
            "is_own": trainer.accelerator is accelerator,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "models": len(accelerator._models),
            "samples": lengths.samples,
            "counter": counter.value,
        }
    return results


def trigger(folder: Path) -> dict[str, Any]:
    """A trigger that one process sets stops all; one that hooks check does not."""
    model, optimizer, _ = parts()
    trainer, watch = make(None, model, optimizer)
    trainer.add_hook(Once(1, 5, lambda trainer: trainer.accelerator.set_trigger()))
    trainer.fit(loaders()[0])

    class Check(hookline.Hook):
        found = 0

        def on_step_end(self, trainer: Trainer, step: int) -> None:
            if RANK == 1 and step == 5:
                trainer.accelerator.set_trigger()
            self.found += trainer.accelerator.check_trigger()

    other, other_watch = make(None, *parts()[:2])
    check = Check()
    other.add_hook(check)
    other.fit(loaders()[0])
    checked = {**describe(other, other_watch), "found": check.found}
    return {"stopped": describe(trainer, watch), "checked": checked}


def fsdp(folder: Path) -> dict[str, Any]:
    """An FSDP2 plugin. Accelerate uses it on GPUs only, so its state is set as it is there."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    try:
        make(None, *parts()[:2], accelerator=accelerator)
    except TrainingError as error:
        refused = str(error)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    trainer, watch = make(None, *parts()[:2], accelerator=accelerator, accumulate=2)
    sync = SyncWatch()
    trainer.add_hook(sync)
    trainer.fit(*loaders())
    kinds = {type(value).__name__ for value in trainer.model.state_dict().values()}
    result = {**describe(trainer, watch), "refused": refused, "kinds": sorted(kinds)}
    return result | {"sync": sync.sync}


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names:
        result = globals()[name](Path(folder) / name)
        (Path(folder) / f"{name}-{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
