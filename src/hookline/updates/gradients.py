"""The gradients of one optimizer as updates get them, and what becomes of what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline.errors import ConfigError, nearest
from hookline.tensors.parameter_names import named_parameters
from hookline.tensors.sharded import is_sharded
from hookline.updates.gradient_mapping import GradientMapping

__all__ = ["Gradients", "NamedParameters", "dense"]


class NamedParameters:
    """The parameters of each optimizer by name, also of those that join it while training."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._known: dict[int, tuple[list[int], dict[str, torch.Tensor]]] = {}

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return those of this optimizer."""
        groups = self._optimizers[idx].param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        ids = [*map(id, parameters)]
        if idx not in self._known or self._known[idx][0] != ids:
            names = named_parameters(self._model, None)
            by_name = {
                names.get(id(parameter), f"optimizer_{idx}.{i}"): parameter
                for i, parameter in enumerate(parameters)
            }
            self._known[idx] = (ids, by_name)
        return self._known[idx][1]


class Gradients(GradientMapping):
    """Gradients by the names of their parameters; those without a gradient are not in it.

    Each update gets it as the one before has left it. What an update returns, or has put into it,
    is checked and becomes the parameters' gradients.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        """All parameters of the optimizer, by the same names."""
        super().__init__((name, p.grad) for name, p in parameters.items() if p.grad is not None)
        self._before = dict(self)

    def _settle(self) -> None:
        new = {
            name: one
            for name, one in self.items()
            if one is not None and one is not self._before.get(name)
        }
        for name, gradient in new.items():
            self._check(name, gradient)
        for name, gradient in new.items():
            # A copy: what follows may change it in place, and the update may have kept it.
            self.parameters[name].grad = gradient.detach().clone()
        self._take_back()

    def _take_back(self) -> None:
        """Hold what the parameters have: what was left out, or put there directly, too."""
        self.clear()
        self.update((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
        self._before = dict(self)

    def _check(self, name: str, gradient: Any) -> None:
        parameter = self.parameters.get(name)
        if parameter is None:
            raise ConfigError(
                f"An update returned a gradient for '{name}', which is no parameter of this "
                f"optimizer.{nearest(str(name), self.parameters)}"
            )
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(
                f"The gradient of '{name}' is a {type(gradient).__name__}; expected a tensor."
            )
        of = parameter if parameter.grad is None else parameter.grad  # it may have another dtype
        for what in ("shape", "dtype", "device"):
            has, needs = getattr(gradient, what), getattr(of, what)
            if has != needs:
                raise ValueError(
                    f"The gradient of '{name}' has {what} {_shown(has)}; expected {_shown(needs)}, "
                    "that of its parameter."
                )
        if is_sharded(gradient) != is_sharded(parameter):
            kinds = ("a plain tensor", "a DTensor")
            raise ValueError(
                f"The gradient of '{name}' is {kinds[is_sharded(gradient)]}; expected "
                f"{kinds[is_sharded(parameter)]}, as its parameter is."
            )


def dense(gradients: Mapping[str, torch.Tensor], who: object) -> list[torch.Tensor]:
    """Return the gradients, for an update that has no way to work on sparse ones."""
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"{type(who).__name__} needs dense gradients, and that of '{name}' is sparse. Make "
                "its layer with sparse=False, or leave the update out."
            )
    return list(gradients.values())


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)
