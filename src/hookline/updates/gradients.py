"""The gradients of one optimizer, as updates get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline.errors import ArgumentError, ConfigError, nearest
from hookline.tensors.parameter_names import named_parameters
from hookline.tensors.sharded import is_sharded
from hookline.updates.gradient_mapping import GradientMapping, check_like


class NamedParameters:
    """The parameters of each optimizer by name, including those added during training."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._cache: dict[int, tuple[list[int], dict[str, torch.Tensor]]] = {}

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return the parameters of the optimizer with this index."""
        groups = self._optimizers[idx].param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        ids = [*map(id, parameters)]
        if idx not in self._cache or self._cache[idx][0] != ids:
            names = named_parameters(self._model, None)
            by_name = {
                names.get(id(parameter), f"optimizer_{idx}.{i}"): parameter
                for i, parameter in enumerate(parameters)
            }
            self._cache[idx] = (ids, by_name)
        return self._cache[idx][1]


class Gradients(GradientMapping):
    """Gradients by parameter name, without parameters that have no gradient.

    Each update gets them as the update before it has left them. What an update returns, or puts
    into the mapping, is checked and becomes the gradient of its parameter.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        """All parameters of the optimizer, by the same names."""
        super().__init__((name, p.grad) for name, p in parameters.items() if p.grad is not None)
        self._before = dict(self)

    def _apply(self) -> None:
        new = {
            name: gradient
            for name, gradient in self.items()
            if gradient is not None and gradient is not self._before.get(name)
        }
        for name, gradient in new.items():
            self._check(name, gradient)
        for name, gradient in new.items():
            # A copy: later updates may change it in place, and this one may have kept it.
            self.parameters[name].grad = gradient.detach().clone()
        self._restore()

    def _restore(self) -> None:
        """Load the parameters' gradients, including those that were removed or set directly."""
        self.clear()
        self.update((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
        self._before = dict(self)

    def _check(self, name: str, gradient: Any) -> None:
        parameter = self.parameters.get(name)
        if parameter is None:
            raise ConfigError(
                f"An update returned a gradient for '{name}', which is not a parameter of this "
                f"optimizer.{nearest(str(name), self.parameters)}"
            )
        # The gradient may have another dtype than the parameter.
        check_like(name, gradient, parameter if parameter.grad is None else parameter.grad)
        if is_sharded(gradient) != is_sharded(parameter):
            kinds = ("a plain tensor", "a DTensor")
            raise ArgumentError(
                f"The gradient of '{name}' is {kinds[is_sharded(gradient)]}; expected "
                f"{kinds[is_sharded(parameter)]} like its parameter."
            )


def require_dense(gradients: Mapping[str, torch.Tensor], update: object) -> list[torch.Tensor]:
    """Return the gradients as a list; raise if one is sparse, which the update cannot handle."""
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"{type(update).__name__} needs dense gradients, but that of '{name}' is sparse. "
                "Create its layer with sparse=False, or remove the update."
            )
    return list(gradients.values())
