"""ActivationStats: logs statistics of the model's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import PositiveInt

from hookline.hook import ForwardHook
from hookline.hooks.monitoring.monitor_bases import TrainingMonitor
from hookline.tensors.nested import tensors_in


class ActivationStats(TrainingMonitor, ForwardHook):
    """Logs the mean and standard deviation of the model's outputs.

    A tensor is logged as `activations/mean` and `activations/std`. The tensors of a mapping, also
    of nested ones, are logged as `activations/<key>/mean` and so on, and those of other outputs by
    number. Real and imaginary parts of complex numbers are counted as separate values.

    Args:
        every: log every N batches, starting with the first.
    """

    every_name = "log_interval"
    cost = "Two reductions of each output in the batches it logs, without waiting for the device."

    def __init__(self, every: PositiveInt = 100) -> None:
        self.every = every
        self._batches = 0

    def __call__(self, activations: Any, trainer: Any = None) -> None:
        self._batches += 1
        if (self._batches - 1) % self.every:
            return
        for name, tensor in _named(activations):
            if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                std, mean = torch.std_mean(real.float(), correction=0)
                if trainer is not None:
                    trainer.log(f"{name}/mean", mean)
                    trainer.log(f"{name}/std", std)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = state["batches"]


def _named(value: Any, name: str = "activations") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, f"{name}/{key}")
    else:
        for i, tensor in enumerate(tensors_in(value)):
            yield f"{name}/{i}", tensor
