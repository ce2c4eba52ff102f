"""Giving all processes the weights and buffers of rank 0.

The functions are collectives: all processes have to call them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from hookline.errors import TrainingError
from hookline.tensors.sharded import is_sharded

__all__ = ["share_buffers", "share_weights"]

_BYTES = 250 * 1024 * 1024  # of tensors that are sent at once, as DDP has it


def share_weights(model: torch.nn.Module) -> None:
    """Give all processes the parameters and buffers of rank 0.

    Raises:
        TrainingError: the models of the processes have different parameters.
    """
    parameters = [parameter.detach() for parameter in model.parameters()]
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return
    functions: Any = dist
    try:
        functions._verify_params_across_processes(dist.group.WORLD, parameters)
    except RuntimeError as error:
        raise TrainingError(
            f"The processes have made different models: {error}. All of them have to run the same "
            "script with the same settings."
        ) from error
    _broadcast(parameters)
    share_buffers(model)


def share_buffers(model: torch.nn.Module) -> None:
    """Give all processes the buffers of rank 0, such as the running means of batch norms.

    Each process changes its own in forward. DDP shares them before the next forward that trains,
    and FSDP2 never does: without this, processes would validate different models.
    """
    own = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # as DDP has it
    _broadcast([b for name, b in model.named_buffers() if name not in own and not is_sharded(b)])


def _broadcast(tensors: list[Any]) -> None:
    if tensors:
        functions: Any = dist
        functions._broadcast_coalesced(dist.group.WORLD, tensors, _BYTES, 0)
