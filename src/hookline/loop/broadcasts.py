"""Broadcasts of rank 0's weights and buffers to all processes.

The functions are collectives: all processes have to call them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from hookline.errors import TrainingError
from hookline.tensors.sharded import is_sharded

_BYTES = 250 * 1024 * 1024  # of tensors that are sent at once, as DDP has it


def broadcast_weights(model: torch.nn.Module) -> None:
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
    broadcast_buffers(model)


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Give all processes the buffers of rank 0, such as the running means of batch norms.

    Each process changes its own in forward, and they are broadcast before the next step: without
    this, processes would validate different models.
    """
    own = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # as DDP has it
    _broadcast([b for name, b in model.named_buffers() if name not in own and not is_sharded(b)])


class BufferBroadcast:
    """Gives all processes the buffers of rank 0 before the first forward of each step, as DDP does.

    FSDP2 does not. Only buffers that are saved are sent: others are constants in most models. All
    processes call the model equally often. `syncs` says whether the next backward ends a step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.syncs = self._is_first = True
        self._buffers = [
            (module, name)
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._handle: Any = None
        if self._buffers:
            self._handle = model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        if not model.training:
            return
        if self._is_first:
            own = [module._buffers[name] for module, name in self._buffers]
            _broadcast([b for b in own if b is not None and not is_sharded(b)])
        self._is_first = self.syncs

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._handle is not None:
            self._handle.remove()


def _broadcast(tensors: list[Any]) -> None:
    if tensors:
        functions: Any = dist
        functions._broadcast_coalesced(dist.group.WORLD, tensors, _BYTES, 0)
