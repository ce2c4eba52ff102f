"""Reading a checkpoint in all processes of a trainer, each of them what it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookline.checkpoint.checkpoint_folder import Checkpoint, CheckpointShare, load_checkpoint
from hookline.errors import CheckpointError
from hookline.loop.processes import OneProcess
from hookline.tensors.sharded import is_sharded
from hookline.trainer.strategies import parameters_of

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

__all__ = ["read_checkpoint"]

_OF_OPTIMIZER = re.compile(r"\['optimizers'\]\[(\d+)\]\['state'\]\[(\d+)\]\[[^\[\]]*\]")
_AVERAGE = re.compile(r"\['hooks'\]\['[^']*'\]\['averages'\]\['([^']*)'\]")


def read_checkpoint(trainer: Trainer, path: Path) -> Checkpoint:
    """Return the contents of a checkpoint, in all of a trainer's processes or in none.

    With sharded parameters, each process verifies the hashes of its own files, and reads its parts
    of the weights, of their averages and of the optimizers' states.

    Raises:
        CheckpointError: the checkpoint is damaged, or a process could not read it.
    """
    processes = trainer.strategy.processes
    if processes.size == 1:
        return load_checkpoint(path)
    checkpoint: Checkpoint | None = None
    error: CheckpointError | None = None
    try:
        if trainer.strategy.is_sharded:
            share = _share(processes, trainer.model, trainer.optimizers)
            checkpoint = load_checkpoint(path, share=share)
        else:
            checkpoint = load_checkpoint(path)
    except CheckpointError as raised:
        error = raised
    problems = processes.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"Rank {rank} could not read the checkpoint: {problem}")
    assert checkpoint is not None
    return checkpoint


def _share(
    processes: OneProcess, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> CheckpointShare:
    weights = {name: value for name, value in model.state_dict().items() if is_sharded(value)}
    plain_names = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    parameters = [parameters_of(optimizer) for optimizer in optimizers]

    def find_state(name: str) -> Tensor | None:
        if found := _OF_OPTIMIZER.fullmatch(name):
            optimizer, parameter = map(int, found.groups())
            several = parameters[optimizer] if optimizer < len(parameters) else []
            return several[parameter] if parameter < len(several) else None
        found = _AVERAGE.fullmatch(name)
        return None if found is None else plain_names.get(found[1])

    return CheckpointShare(processes.rank, processes.size, weights.get, find_state)
