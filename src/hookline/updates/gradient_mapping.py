"""Gradients by name, as they pass through the updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hookline.errors import ArgumentError, ConfigError, nearest
from hookline.hook import Hook


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
