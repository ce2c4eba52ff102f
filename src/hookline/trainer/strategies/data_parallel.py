"""The strategy for several processes that each have a whole copy of the model (DDP)."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from hookline.loop.processes import OneProcess
from hookline.trainer.strategies.single_process import Precision, SingleProcess

__all__ = ["DataParallel"]


class DataParallel(SingleProcess):
    """Train the same model in several processes on different batches; gradients are averaged.

    Args:
        device: the device of this process.
        precision: the precision of forward and loss.
        processes: the processes.
    """

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        processes: OneProcess,
    ) -> None:
        super().__init__(device, precision, processes)
        self._wrapper: DistributedDataParallel | None = None

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return what the loop calls instead of the model; the weights of rank 0 are used."""
        devices = None if self.device.type == "cpu" else [self.device]
        self._wrapper = DistributedDataParallel(model, device_ids=devices)
        return self._wrapper

    def unwrap(self) -> None:
        """Forget the wrapper, whose hooks are on the parameters."""
        self._wrapper = None

    def begin_batch(self, *, completes_step: bool, sync: bool) -> None:
        """Set whether the next backward averages gradients, as `no_sync` of the wrapper does."""
        assert self._wrapper is not None
        self._wrapper.require_backward_grad_sync = sync  # read by forward
