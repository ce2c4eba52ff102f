"""Public names of a package that are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str,
    modules: Mapping[str, Iterable[str]],
    aliases: Mapping[str, str] | None = None,
    subpackages: Iterable[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package."""
    module_of = {name: module for module, names in modules.items() for name in names}
    name_of = {**{name: name for name in module_of}, **(aliases or {})}
    subpackages = frozenset(subpackages)

    def get_name(name: str) -> Any:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in name_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name_of[name]]}"), name_of[name])
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    def list_names() -> list[str]:
        return sorted({*sys.modules[package].__all__, *subpackages})

    return get_name, list_names
