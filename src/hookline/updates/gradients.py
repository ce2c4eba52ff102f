"""The gradients of one optimizer as updates get them, and what becomes of what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hookline.errors import ConfigError, nearest
from hookline.parameters import named_parameters
from hookline.sharding import is_sharded
from hookline.updates.carrying import Carried

__all__ = ["Gradients", "NamedParameters"]


class NamedParameters:
    """The parameters of each optimizer by name, also of those that join it while training."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._known: dict[int, dict[str, torch.Tensor]] = {}

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return those of this optimizer."""
        groups = self._optimizers[idx].param_groups
        known = self._known.get(idx)
        if known is None or len(known) != sum(len(group["params"]) for group in groups):
            names = named_parameters(self._model, None)
            parameters = [parameter for group in groups for parameter in group["params"]]
            known = self._known[idx] = {
                names.get(id(parameter), f"optimizer_{idx}.{i}"): parameter
                for i, parameter in enumerate(parameters)
            }
        return known


class Gradients(Carried):
    """Gradients by the names of their parameters; those without a gradient are not in it.

    Each update gets it as the one before has left it. What an update returns, or has put into it,
    is checked and becomes the parameters' gradients.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        super().__init__((name, p.grad) for name, p in parameters.items() if p.grad is not None)

    def _settle(self) -> None:
        for name, parameter in self._parameters.items():
            gradient = self.get(name)
            if gradient is None:
                if parameter.grad is not None:
                    self[name] = parameter.grad  # left out: it keeps its gradient
            elif gradient is not parameter.grad:
                self._check(name, parameter, gradient)
                parameter.grad = self[name] = gradient.detach()
        if len(self) > len(self._parameters) or any(name not in self._parameters for name in self):
            unknown = next(name for name in self if name not in self._parameters)
            raise ConfigError(
                f"An update returned a gradient for '{unknown}', which is no parameter of this "
                f"optimizer.{nearest(str(unknown), self._parameters)}"
            )

    def _check(self, name: str, parameter: torch.Tensor, gradient: Any) -> None:
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(
                f"The gradient of '{name}' is a {type(gradient).__name__}; expected a tensor."
            )
        for what in ("shape", "dtype", "device"):
            has, needs = getattr(gradient, what), getattr(parameter, what)
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


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)
