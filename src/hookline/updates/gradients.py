"""Gradients by name, as they pass through the updates. Importing this does not import torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookline.errors import ArgumentError, ConfigError, nearest
from hookline.hook import Hook

if TYPE_CHECKING:
    import torch


class GradientMapping(dict[str, Any]):
    """Gradients by name. Each update gets them as the update before it has left them."""

    def carry(
        self,
        hook: Hook,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Call an update and apply what it returns; if it fails, restore the gradients."""
        try:
            returned = call(*args, **kwargs)
            if returned is not None:
                if not isinstance(returned, Mapping):
                    raise ArgumentError(
                        "An update returns a mapping from names to gradients, or None, not a "
                        f"{type(returned).__name__}."
                    )
                self.update(returned)
            self._apply()
        except BaseException:
            self._restore()
            raise

    @abstractmethod
    def _apply(self) -> None:
        """Check the entries and use them as gradients; missing ones keep their gradient."""

    @abstractmethod
    def _restore(self) -> None:
        """Put the current gradients back into the mapping."""


class StandaloneGradients(GradientMapping):
    """Gradients that are passed to updates directly, without parameters."""

    def __init__(self, gradients: Mapping[str, Any]) -> None:
        self._current = {name: g for name, g in gradients.items() if g is not None}
        super().__init__(self._current)

    def _apply(self) -> None:
        for name, gradient in self._current.items():
            self.setdefault(name, gradient)
        for name, gradient in self.items():
            if name not in self._current:
                raise ConfigError(
                    f"An update returned a gradient for '{name}', but it was not given one."
                    f"{nearest(str(name), self._current)}"
                )
            check_like(name, gradient, self._current[name])
        self._current = dict(self)

    def _restore(self) -> None:
        self.clear()
        self.update(self._current)


def check_like(name: str, gradient: Any, expected: Any) -> None:
    """Raise if a gradient's shape, dtype or device is not the expected one's."""
    if not hasattr(gradient, "shape"):
        kind = type(gradient).__name__
        raise ArgumentError(f"The gradient of '{name}' is a {kind}; expected a tensor.")
    for attribute in ("shape", "dtype", "device"):
        found: Any = getattr(gradient, attribute, None)
        wanted = getattr(expected, attribute)
        if found != wanted:
            if attribute == "shape":
                found, wanted = list(found), list(wanted)
            raise ArgumentError(
                f"The gradient of '{name}' has {attribute} {found}; expected {wanted}."
            )


class NamedParameters:
    """The parameters of each optimizer by name, including those added during training."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._cache: dict[int, tuple[list[int], dict[str, torch.Tensor]]] = {}

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return the parameters of the optimizer with this index."""
        from hookline.tensors.parameter_names import named_parameters

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
        from hookline.tensors.sharded import is_sharded

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
        if str(gradient.layout) != "torch.strided":
            raise ConfigError(
                f"{type(update).__name__} needs dense gradients, but that of '{name}' is sparse. "
                "Create its layer with sparse=False, or remove the update."
            )
    return list(gradients.values())
