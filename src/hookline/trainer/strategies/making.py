"""The choice of a strategy, by the configuration and the processes that were started."""

from __future__ import annotations

from typing import Any

import torch

from hookline.config.trainer_config import TrainerConfig
from hookline.errors import TrainingError
from hookline.loop.processes import join_processes, local_rank, world_size
from hookline.trainer.strategies.accelerators import (
    check_accelerator,
    is_launched,
    make_accelerator,
)
from hookline.trainer.strategies.single_process import SingleProcess

__all__ = ["make_strategy"]


def make_strategy(
    config: TrainerConfig, device: torch.device, accelerator: Any = None
) -> SingleProcess:
    """Return the strategy that the configuration names, for a process on this device.

    Args:
        config: the configuration.
        device: the device; an Accelerator has its own.
        accelerator: the user's Accelerator, if the strategy is "accelerate".

    Raises:
        TrainingError: the strategy is for one process, and several were started.
    """
    if config.strategy == "accelerate" or (config.strategy == "auto" and is_launched()):
        from hookline.trainer.strategies.accelerated import Accelerated

        if accelerator is None:
            accelerator = make_accelerator(config)
        check_accelerator(accelerator, config)
        return Accelerated(accelerator)
    if device.type != "cpu" and str(device) == device.type and world_size() > 1:  # has no index
        device = torch.device(device.type, local_rank())  # each process of a node has its own
        torch.get_device_module(device).set_device(device)
    if config.strategy == "single" and world_size() > 1:
        raise TrainingError(
            f"The strategy is 'single', but this script runs in {world_size()} processes "
            "(WORLD_SIZE, or the process group's size): each would train a model of its own. Use "
            "strategy='ddp', or start the script in one process."
        )
    processes = join_processes(device)
    if processes.size == 1:
        return SingleProcess(device, config.precision, processes)
    if config.strategy == "fsdp":
        from hookline.trainer.strategies.fully_sharded import FullySharded

        return FullySharded(device, config.precision, processes, config.fsdp)
    from hookline.trainer.strategies.data_parallel import DataParallel

    return DataParallel(device, config.precision, processes, config.ddp)
