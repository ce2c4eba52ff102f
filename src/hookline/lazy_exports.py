"""Public names that are loaded when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_getattr"]


def lazy_getattr(package: str, files: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    Args:
        package: its name.
        files: its public names, by the file that has them.
    """
    where = {name: file for file, names in files.items() for name in names}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{where[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next look-up is an ordinary one
        return value

    return get
