"""Updates with state, which is saved in checkpoints."""

# pyright: reportPrivateImportUsage=false
# The names of torch's foreach kernels, which its optimizers also use, begin with an underscore.

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat

from hookline.hook import UpdateHook
from hookline.options import BuiltIn
from hookline.tensors.sharded import is_sharded, local, shard_index, shard_like
from hookline.updates.gradients import require_dense


class Noise(BuiltIn, UpdateHook):
    """Adds Gaussian noise to the gradients, with a variance that decreases over time.

    After `t` steps the variance is `eta / (1 + t) ** gamma` (Neelakantan et al., 2015, "Adding
    gradient noise improves learning for very deep networks"). The noise comes from its own
    generator, so the random numbers of training do not change.

    Args:
        eta: the variance in the first step.
        gamma: how fast the variance decreases; 0: it is constant.
        seed: the seed of the generator.
    """

    cost = "One random number per gradient element."

    def __init__(
        self,
        eta: PositiveFloat = 0.01,
        gamma: Annotated[float, Field(ge=0)] = 0.55,
        seed: int = 0,
    ) -> None:
        self.eta, self.gamma, self.seed = eta, gamma, seed
        self._steps: dict[int, int] = {}  # of each optimizer
        self._generators: dict[str, torch.Generator] = {}
        self._saved: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: Mapping[str, torch.Tensor], optimizer_idx: int) -> None:
        """Add noise to the gradients."""
        steps = self._steps.get(optimizer_idx, 0)
        self._steps[optimizer_idx] = steps + 1
        try:
            scale = (self.eta / (1 + steps) ** float(self.gamma)) ** 0.5
        except OverflowError:  # of a large gamma
            scale = 0.0
        tensors = require_dense(gradients, self)
        parts = [local(gradient) for gradient in tensors]
        noise = [self._sample(local(gradient), shard_index(gradient)) for gradient in tensors]
        if parts:
            torch._foreach_add_(parts, noise, alpha=scale)

    def _sample(self, like: torch.Tensor, shard: int) -> torch.Tensor:
        """Return normal noise. Each shard has a generator, and so other noise; copies of it none.

        Ranks that have the same part of a gradient, or all of it, draw the same noise.
        """
        shape, dtype, device = like.shape, like.dtype, like.device
        key = f"{device} {shard}" if shard else str(device)
        generator = self._generators.get(key)
        if generator is None:
            generator = self._generators[key] = torch.Generator(device)
            generator.manual_seed(self.seed + shard)
            if key in self._saved:
                generator.set_state(self._saved[key])
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def state_dict(self) -> dict[str, Any]:
        """Return the step counters and the generators' states."""
        states = {name: generator.get_state() for name, generator in self._generators.items()}
        random = {**self._saved, **states}  # also of devices that were not used since loading
        return {"steps": {str(k): n for k, n in self._steps.items()}, "random": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the step counters and the generators' states."""
        self._steps = {int(k): n for k, n in state["steps"].items()}
        self._saved = dict(state["random"])
        self._generators.clear()


class EMAFilter(BuiltIn, UpdateHook):
    """Amplifies slow gradients: adds their exponential moving average to the gradients.

    (Lee et al., 2024, "Grokfast".) Values that are not finite, as after an overflow of the loss
    scale, are not averaged, because they would never leave the average.

    Args:
        alpha: the decay of the average.
        strength: the factor by which the average is added.
    """

    cost = (
        "Two foreach operations and a check of each gradient, and memory for two copies of them, "
        "one of which is temporary."
    )

    def __init__(
        self,
        alpha: Annotated[float, Field(ge=0, lt=1)] = 0.98,
        strength: Annotated[float, Field(ge=0)] = 2.0,
    ) -> None:
        self.alpha, self.strength = alpha, strength
        self._averages: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Update the average, which starts with the first gradient, and add it."""
        for name, gradient in gradients.items():
            average = self._averages.get(name)
            if average is None:
                self._averages[name] = gradient.detach().nan_to_num(0.0, 0.0, 0.0)
            elif average.device != gradient.device or is_sharded(gradient):  # from a checkpoint
                self._averages[name] = shard_like(average.to(gradient.device), gradient)
        tensors = require_dense(gradients, self)
        if not tensors:
            return
        averages = [self._averages[name] for name in gradients]
        pairs = zip(tensors, averages, strict=True)
        finite = [torch.where(tensor.isfinite(), tensor, average) for tensor, average in pairs]
        torch._foreach_lerp_(averages, finite, 1.0 - self.alpha)
        torch._foreach_add_(tensors, averages, alpha=self.strength)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter name."""
        return {"averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages."""
        self._averages = {name: average.clone() for name, average in state["averages"].items()}
