"""The trainer on Hugging Face Accelerate, and a trainer of any kind with its data in one call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hookline.arguments import check_instance, show_value
from hookline.config.trainer_config import HooksConfig, TrainerConfig
from hookline.errors import TrainingError
from hookline.trainer.trainer import Trainer


class AccelerateTrainer(Trainer):
    """A `Trainer` whose strategy is "accelerate".

        accelerator = Accelerator(mixed_precision="bf16")
        trainer = AccelerateTrainer(config, model, optimizer, accelerator=accelerator)

    Without an Accelerator it makes one, as `accelerate launch` says. Hooks find it in
    `trainer.accelerator`.
    """

    _needs_accelerate = True


def get_trainer(
    kind: str,
    model: torch.nn.Module,
    dataloader: Any,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    device: Any = None,
    **options: Any,
) -> Trainer:
    """Return a trainer with its data: `get_trainer("simple", model, loader, optimizer)`.

    `options` are the fields of `TrainerConfig`, `val_loaders`, and the arguments of `Trainer`.
    "ddp" and "fsdp" are for scripts that `torchrun` starts in several processes, "accelerate" is
    for Hugging Face Accelerate.
    """
    if not isinstance(kind, str) or kind not in ("simple", "ddp", "fsdp", "accelerate"):
        known = "'simple', 'ddp', 'fsdp' and 'accelerate'"
        raise TrainingError(f"Unknown trainer {show_value(kind)}. There are {known}.")
    if device is not None:
        check_instance("get_trainer(…, device=…)", device, str | torch.device, "a device or None")
    if kind != "simple":
        options = {"strategy": kind, **options}
    own = ("config", "model", "optimizers", "hooks")
    arguments = [name for name in inspect.signature(Trainer).parameters if name not in own]
    hooks = options.get("hooks", {})
    is_config = isinstance(hooks, Mapping) and set(hooks) <= set(HooksConfig.model_fields)
    if not is_config and not isinstance(hooks, HooksConfig):
        arguments.append("hooks")  # hooks themselves, a registry, or its configuration
    passed = {name: options.pop(name) for name in arguments if name in options}
    val_loaders = options.pop("val_loaders", None)
    config = TrainerConfig(device=None if device is None else str(device), **options)
    make: type[Trainer] = AccelerateTrainer if kind == "accelerate" else Trainer
    trainer = make(config, model, optimizer, **passed)
    trainer.set_data(dataloader, val_loaders)
    return trainer
