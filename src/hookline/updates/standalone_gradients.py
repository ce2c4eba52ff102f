"""Gradients that are handed to updates by hand, without parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.errors import ConfigError, nearest
from hookline.updates.gradient_mapping import GradientMapping

__all__ = ["GivenGradients"]


class GivenGradients(GradientMapping):
    """Gradients on their way through the updates; each gets them as the one before left them."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = {name: one for name, one in given.items() if one is not None}
        super().__init__(self._given)

    def _settle(self) -> None:
        for name, gradient in self._given.items():
            self.setdefault(name, gradient)  # left out: it keeps its gradient
        for name, gradient in self.items():
            self._check(name, gradient)
        self._given = dict(self)

    def _take_back(self) -> None:
        self.clear()
        self.update(self._given)

    def _check(self, name: str, gradient: Any) -> None:
        if name not in self._given:
            raise ConfigError(
                f"An update returned a gradient for '{name}', which is none of those it got."
                f"{nearest(str(name), self._given)}"
            )
        for what in ("shape", "dtype", "device"):
            has, needs = getattr(gradient, what, None), getattr(self._given[name], what)
            if has != needs:
                raise ValueError(
                    f"The gradient of '{name}' has {what} {has}; expected {needs}, as it was."
                )
