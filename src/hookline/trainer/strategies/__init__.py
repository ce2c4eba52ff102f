"""Strategies: what the trainer needs from the place where it runs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch

from hookline.config.trainer_config import TrainerConfig
from hookline.errors import TrainingError
from hookline.loop.processes import join_processes, local_rank, world_size
from hookline.trainer.strategies.single_process import SingleProcess

__all__ = ["SingleProcess", "make_strategy"]


def make_strategy(
    config: TrainerConfig, device: torch.device, accelerator: Any, *, needs_accelerate: bool
) -> SingleProcess:
    """Return the strategy that the configuration names, for a process on this device.

    Raises:
        TrainingError: it names another one than Accelerate's, which is needed.
    """
    if needs_accelerate:
        if config.strategy not in ("auto", "accelerate"):
            raise TrainingError(
                f"The configuration has strategy='{config.strategy}', which does not use an "
                "Accelerator. Use strategy='accelerate', or leave it out."
            )
        config = config.model_copy(update={"strategy": "accelerate"})
    if config.strategy == "accelerate" or (config.strategy == "auto" and _is_launched()):
        from hookline.trainer.strategies.accelerated import Accelerated

        return Accelerated(accelerator, config)
    if device.type != "cpu" and str(device) == device.type and world_size() > 1:  # has no index
        device = torch.device(device.type, local_rank())  # each process of a node has its own
        torch.get_device_module(device).set_device(device)
    if config.strategy == "single" and world_size() > 1:
        raise TrainingError(
            f"The strategy is 'single', but this script runs in {world_size()} processes, and each "
            "would train a model of its own. Use strategy='ddp', or start it in one process."
        )
    processes = join_processes(device)
    if processes.size == 1:
        return SingleProcess(device, config, processes)
    from hookline.trainer.strategies.several_processes import DataParallel, FullySharded

    kind = FullySharded if config.strategy == "fsdp" else DataParallel
    return kind(device, config, processes)


def _is_launched() -> bool:
    """Return whether `accelerate launch` has started this process, and Accelerate is installed."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ and find_spec("accelerate") is not None
