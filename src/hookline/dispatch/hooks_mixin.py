"""HooksMixin: the methods that trainers and sessions pass on to their manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from hookline.dispatch.manager import HookManager
from hookline.hook import Hook

__all__ = ["HooksMixin"]


Manager = TypeVar("Manager", bound=HookManager)


class HooksMixin(Generic[Manager]):
    """Base of classes that have hooks."""

    hooks: Manager

    @property
    def hook_manager(self) -> Manager:
        """Another name for `hooks`."""
        return self.hooks

    def add_hook(
        self, hook: Hook | Callable[..., Any], name: str | None = None, **options: Any
    ) -> str:
        """Register a hook and return its name; see `HookManager.add_hook`."""
        return self.hooks.add_hook(hook, name, **options)

    def remove_hook(self, name: str) -> Hook:
        """Remove a hook and return it."""
        return self.hooks.remove_hook(name)

    def enable_hook(self, name: str) -> None:
        """Enable a hook."""
        self.hooks.enable_hook(name)

    def disable_hook(self, name: str) -> None:
        """Disable a hook."""
        self.hooks.disable_hook(name)
