"""From class paths to classes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hookline.errors import ConfigError, nearest
from hookline.hook import Hook

__all__ = ["load_class", "make_hook"]


def load_class(path: str) -> Any:
    """Return the class of this path, such as `mypackage.hooks.MyHook`."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"'{path}' is no class path: write it with its module, `package.{path}`.")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"'{path}': the module '{module_name}' could not be imported ({error})."
        ) from error
    if not hasattr(module, name):
        hint = nearest(name, dir(module))
        raise ConfigError(f"'{path}': the module '{module_name}' has no '{name}'.{hint}")
    return getattr(module, name)


def make_hook(path: str, options: dict[str, Any]) -> Hook:
    """Return a hook of this class, made with these arguments."""
    kind = load_class(path)
    if not (isinstance(kind, type) and issubclass(kind, Hook)):
        raise ConfigError(f"'{path}' is not a hook: it does not inherit from hookline.Hook.")
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(f"'{path}' cannot be made with {options}: {error}.") from error
