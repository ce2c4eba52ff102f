"""Updates that remember something from step to step; it is saved in checkpoints."""

# pyright: reportPrivateImportUsage=false
# The foreach kernels of torch, which optimizers use too, have names with an underscore.

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat

from hookline.hook import UpdateHook
from hookline.options import BuiltIn
from hookline.tensors.sharded import is_sharded, local
from hookline.updates.gradients import dense

__all__ = ["EMAFilter", "Noise"]


class Noise(BuiltIn, UpdateHook):
    """Adds Gaussian noise to the gradients, less and less of it.

    After `t` steps its variance is `eta / (1 + t) ** gamma` (Neelakantan et al., 2015, "Adding
    gradient noise improves learning for very deep networks"). It has random numbers of its own, so
    it does not change what training draws.

    Args:
        eta: the variance in the first step.
        gamma: how fast it falls; 0 for not at all.
        seed: of its random numbers.
    """

    cost = "As many random numbers as there are gradients."

    def __init__(
        self,
        eta: PositiveFloat = 0.01,
        gamma: Annotated[float, Field(ge=0)] = 0.55,
        seed: int = 0,
    ) -> None:
        self.eta = eta
        self.gamma = gamma
        self.seed = seed
        self._steps: dict[int, int] = {}  # of each optimizer
        self._generators: dict[str, torch.Generator] = {}
        self._saved: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: Mapping[str, torch.Tensor], optimizer_idx: int) -> None:
        """Add noise."""
        steps = self._steps.get(optimizer_idx, 0)
        self._steps[optimizer_idx] = steps + 1
        scale = (self.eta / (1 + steps) ** self.gamma) ** 0.5
        parts = [local(gradient) for gradient in dense(gradients, self)]
        sharded = any(is_sharded(gradient) for gradient in gradients.values())
        noise = [
            torch.randn(
                part.shape,
                generator=self._generator(part.device, sharded),
                dtype=part.dtype,
                device=part.device,
            )
            for part in parts
        ]
        if parts:
            torch._foreach_add_(parts, noise, alpha=scale)

    def _generator(self, device: torch.device, sharded: bool) -> torch.Generator:
        """Its own generator there; where each rank has a part, each has numbers of its own."""
        generator = self._generators.get(str(device))
        if generator is None:
            generator = self._generators[str(device)] = torch.Generator(device)
            rank = torch.distributed.get_rank() if sharded else 0
            generator.manual_seed(self.seed + rank)
            if str(device) in self._saved:
                generator.set_state(self._saved[str(device)])
        return generator

    def state_dict(self) -> dict[str, Any]:
        """Return how far it is, and the state of its random numbers."""
        states = {name: one.get_state() for name, one in self._generators.items()}
        random = {**self._saved, **states}  # also of a device that had no turn since it was loaded
        return {"steps": {str(k): n for k, n in self._steps.items()}, "random": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._steps = {int(k): n for k, n in state["steps"].items()}
        self._saved = dict(state["random"])
        self._generators.clear()


class EMAFilter(BuiltIn, UpdateHook):
    """Amplifies slow gradients: adds a running average of the gradients to them.

    (Lee et al., 2024, "Grokfast".) What is not finite, as when a loss scale was too large, does not
    get into the average: it would stay there for good.

    Args:
        alpha: how much of the average stays in each step.
        strength: how much of the average is added.
    """

    cost = (
        "Two foreach operations and a check of each gradient, and memory for two copies of them, "
        "one of these for the moment."
    )

    def __init__(
        self,
        alpha: Annotated[float, Field(ge=0, lt=1)] = 0.98,
        strength: Annotated[float, Field(ge=0)] = 2.0,
    ) -> None:
        self.alpha = alpha
        self.strength = strength
        self._averages: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add the average, which begins with the first gradient."""
        for name, gradient in gradients.items():
            average = self._averages.get(name)
            if average is None:
                self._averages[name] = gradient.detach().nan_to_num(0.0, 0.0, 0.0)
            elif average.device != gradient.device:
                self._averages[name] = average.to(gradient.device)  # from a checkpoint
        tensors = dense(gradients, self)
        if not tensors:
            return
        averages = [self._averages[name] for name in gradients]
        torch._foreach_lerp_(averages, _finite(tensors, averages), 1.0 - self.alpha)
        torch._foreach_add_(tensors, averages, alpha=self.strength)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._averages = {name: one.clone() for name, one in state["averages"].items()}


def _finite(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with the others' numbers where theirs are not finite. Nothing is waited for."""
    pairs = zip(tensors, others, strict=True)
    return [torch.where(tensor.isfinite(), tensor, other) for tensor, other in pairs]
