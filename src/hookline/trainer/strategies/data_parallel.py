"""The strategy for several processes that each have a whole copy of the model (DDP)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hookline.config.trainer_config import DDPConfig
from hookline.errors import TrainingError
from hookline.loop.broadcasts import broadcast_weights
from hookline.loop.processes import SingleProcessGroup
from hookline.trainer.strategies.single_process import Precision, SingleProcess


class CallCheck:
    """Checks that the loss is computed with the wrapper, whose forward prepares the averaging."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._is_called = False
        self._handle: Any = wrapper.register_forward_pre_hook(self._note_call)

    def _note_call(self, *_: Any) -> None:
        self._is_called = True
        self.close()

    def close(self) -> None:
        """Remove the hook from the wrapper."""
        self._handle.remove()

    def require_call(self) -> None:
        """Raise if the wrapper was never called, so that gradients would not be averaged."""
        if not self._is_called:
            raise TrainingError(
                "step_fn(model, batch) has computed the loss without calling `model`, which "
                "averages the gradients of all processes when it is called: each process would "
                "train a model of its own. Call `model(…)`, not the model itself or its methods."
            )


class DataParallel(SingleProcess):
    """Train the same model in several processes on different batches; gradients are averaged."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        processes: SingleProcessGroup,
        config: DDPConfig,
    ) -> None:
        super().__init__(device, precision, processes)
        self._config = config
        self._wrapper: DistributedDataParallel | None = None
        self._check: CallCheck | None = None

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Return the model with rank 0's weights: it may be validated or copied before training."""
        prepared = super().prepare(model, optimizers)
        broadcast_weights(model)
        return prepared

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return what the loop calls instead of the model; the weights of rank 0 are used."""
        devices = None if self.device.type == "cpu" else [self.device]
        self._wrapper = DistributedDataParallel(
            model,
            device_ids=devices,
            find_unused_parameters=self._config.find_unused_parameters,
            gradient_as_bucket_view=self._config.gradient_as_bucket_view,
        )
        self._check = CallCheck(self._wrapper)
        return self._wrapper

    def unwrap(self) -> None:
        """Forget the wrapper, whose hooks are on the parameters."""
        self._wrapper = self._check = None

    def begin_batch(self, *, completes_step: bool, sync: bool) -> None:
        """Set whether the next backward averages gradients, as `no_sync` of the wrapper does."""
        assert self._wrapper is not None
        self._wrapper.require_backward_grad_sync = sync  # read by forward

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, which averages the gradients of all processes."""
        if self._check is not None:
            self._check.require_call()
        super().backward(loss)
