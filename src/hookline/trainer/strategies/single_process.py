"""The strategy for one process on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hookline.config.trainer_config import TrainerConfig
from hookline.errors import ConfigError
from hookline.loop.event_context import parameters_of
from hookline.loop.processes import SingleProcessGroup

if TYPE_CHECKING:
    from hookline.trainer.strategies.several_processes import GradientSync

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SingleProcess:
    """Train in one process on one device; `fp16` has a gradient scaler.

    Its `config` also has the settings that are made elsewhere.
    """

    is_sharded = False  # whether each process has a shard of each parameter
    forward_is_collective = False  # whether all processes have to call the model equally often
    has_trigger = False  # whether `stop_reason` is asked after every step
    accelerator: Any = None  # the `Accelerator`, if there is one

    def __init__(
        self, device: torch.device, config: TrainerConfig, processes: SingleProcessGroup
    ) -> None:
        self.device, self.processes, self.config = device, processes, config
        self.needs_transfer = device.type != "cpu"
        self.scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
        self._dtype = _DTYPES.get(config.precision)  # that forward and loss are autocast to
        self._sync: GradientSync | None = None  # with several processes, in a run

    @property
    def is_distributed(self) -> bool:
        """Whether other processes take part in the run."""
        return self.processes.size > 1

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Return the model on the device, and the optimizers, which keep its parameters."""
        return model.to(self.device), optimizers

    def unwrap_schedulers(self, schedulers: Any) -> Any:
        """Return the schedulers without the wrappers of the strategy."""
        return schedulers

    def stepped_scheduler(self, scheduler: Any) -> Any:
        """Return what is stepped for a scheduler after its optimizer has stepped."""
        return scheduler

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return what the loop calls instead of the model."""
        return model

    def unwrap(self) -> None:
        """Undo `wrap`, at the end of a run: the wrapper has hooks on the parameters."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def move(self, batch: Any) -> Any:
        """Return the batch with all its tensors on the device, also those in containers."""
        if not self.needs_transfer:
            return batch
        if isinstance(batch, torch.Tensor):
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {key: self.move(value) for key, value in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.move(value) for value in batch))
        if isinstance(batch, list | tuple):
            return type(batch)(self.move(value) for value in batch)
        return batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward and loss are computed."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)

    def begin_batch(self, *, completes_step: bool, sync: bool) -> None:
        """Prepare for a batch, before its forward; not called if each batch is a step.

        Args:
            completes_step: whether the batch completes a step.
            sync: whether its backward reduces the gradients that have been accumulated.
        """
        if self._sync is not None:
            self._sync.set(sync)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, on the scaled loss if there is a scaler; gradients may be reduced."""
        if self._sync is not None:
            self._sync.require_call()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip(
        self, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None
    ) -> torch.Tensor:
        """Clip an optimizer's gradients; return their norm before clipping."""
        parameters = parameters_of(optimizer)
        grads = [p.grad for p in parameters if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise ConfigError(
                "Clipping needs dense gradients, but one of the model's is sparse. Create its "
                "layer with sparse=False, or leave out clip_norm and clip_value."
            )
        if norm is not None:
            before = torch.nn.utils.clip_grad_norm_(parameters, norm)
        else:
            before = torch.nn.utils.get_total_norm(grads)
        if value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)
        return before

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run `optimizer.step()`; return False if the scaler skipped it."""
        if self.scaler is None:
            optimizer.step()
            return True
        self.scaler.step(optimizer)
        found = self.scaler._found_inf_per_device(optimizer)
        return not any(flag.item() for flag in found.values())  # read by its step already

    def end_step(self, pending: Iterable[torch.optim.Optimizer]) -> None:
        """Update the scale, and rescale the gradients of optimizers that did not step."""
        if self.scaler is None:
            return
        rescaled = [p.grad for optimizer in pending for p in parameters_of(optimizer)]
        before = self.scaler.get_scale() if rescaled else 1.0  # waits for the device
        self.scaler.update()
        factor = self.scaler.get_scale() / before if rescaled else 1.0
        if factor != 1.0:
            for gradient in rescaled:
                if gradient is not None:
                    gradient.mul_(factor)

    def stop_reason(self) -> str | None:
        """Return why training is to stop, if that was requested from the strategy."""
        return None

    def state(self) -> dict[str, Any]:
        """Return what else a checkpoint contains."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
