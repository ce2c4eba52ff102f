"""One process, one device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

__all__ = ["SingleProcess"]


class SingleProcess:
    """The plain strategy. Another one has the same methods, and the loop stays as it is.

    Args:
        device: where to train.
        precision: `fp32`, `bf16` (autocast) or `fp16` (autocast and a gradient scaler).
    """

    is_main = True
    alone = True  # there are no other processes to agree with

    def __init__(self, device: torch.device, precision: Literal["fp32", "bf16", "fp16"]) -> None:
        self.device = device
        self.precision = precision
        self.moves = device.type != "cpu"
        scaled = precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled) if scaled else None
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Put the model where it trains; its parameters stay the optimizers'."""
        return model.to(self.device), optimizers

    def move(self, batch: Any) -> Any:
        """Return the batch on the device: tensors in tuples, lists and mappings too."""
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
        """The precision of forward and loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Around a backward whose gradients need not be exchanged yet."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, scaled where the precision needs it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's gradients what they are without the scale."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip(
        self, optimizer: torch.optim.Optimizer, norm: float | None, value: float | None
    ) -> torch.Tensor:
        """Clip an optimizer's gradients; return their norm before it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if norm is not None:
            before = torch.nn.utils.clip_grad_norm_(parameters, norm)
        else:
            grads = [p.grad for p in parameters if p.grad is not None]
            before = torch.nn.utils.get_total_norm(grads)
        if value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)
        return before

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step; return False when the scaler has skipped it."""
        if self.scaler is None:
            optimizer.step()
            return True
        self.scaler.step(optimizer)
        found = self.scaler._found_inf_per_device(optimizer)
        return not any(flag.item() for flag in found.values())  # read by its step already

    def end_step(self) -> None:
        """All optimizers have had their turn."""
        if self.scaler is not None:
            self.scaler.update()

    def reduce(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over all processes."""
        return value

    def any_rank(self, *requests: bool) -> tuple[bool, ...]:
        """Return for each request whether any rank makes it; the same on all ranks."""
        return requests

    def barrier(self) -> None:
        """Wait for the others."""

    def save(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's weights, whole."""
        return model.state_dict()

    def load(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the model its weights back."""
        model.load_state_dict(dict(weights))
