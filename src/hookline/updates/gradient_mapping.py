"""Gradients on their way through the updates: what each of them returns is taken."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hookline.hook import Hook

__all__ = ["GradientMapping"]


class GradientMapping(dict[str, Any]):
    """Gradients by name; each update gets them as the one before has left them."""

    def carry(
        self,
        hook: Hook,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Call an update, and take what it returns; when it fails, nothing of it."""
        try:
            returned = call(*args, **kwargs)
            if returned is not None:
                if not isinstance(returned, Mapping):
                    raise TypeError(
                        "An update returns a mapping from names to gradients, or None, not a "
                        f"{type(returned).__name__}."
                    )
                self.update(returned)
            self._settle()
        except BaseException:
            self._take_back()
            raise

    @abstractmethod
    def _settle(self) -> None:
        """Check what is here now, and use it; what was left out keeps its gradient."""

    @abstractmethod
    def _take_back(self) -> None:
        """Hold what was there before."""
