"""What every config file may name: of torch and of Hookline, the parts that run no foreign code.

All of torch would be too much: `torch.load` unpickles, `torch.hub.load` runs a repository, and
`torch.utils.collect_env.run` runs a command.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from hookline.hook import Hook

__all__ = ["DESCRIPTION", "functional_names", "is_default_path", "is_default_target"]

DESCRIPTION = (
    "public classes of torch.nn, torch.optim and torch.utils.data, functions of "
    "torch.nn.functional, and Hookline's hooks, probes and updates"
)
_TORCH = ("torch.nn", "torch.optim", "torch.utils.data")
_EXCLUDED = (
    "torch.utils.data.datapipes",  # deprecated; some open files or unpickle
    "torch.nn.cpp",  # wrappers that return any attribute of any object
)
_FUNCTIONAL = "torch.nn.functional"
_FUNCTIONS = ("torch.utils.data.default_collate", "torch.utils.data.default_convert")
_HOOKS = ("hookline.hooks", "hookline.probes", "hookline.updates")
_FUNCTIONAL_SOURCES = (_FUNCTIONAL, "torch", "torch._C._nn")  # some forty are written in C++


def is_default_path(path: str) -> bool:
    """Return whether a path leads to a part of torch or Hookline that may be imported."""
    if any(part.startswith("_") for part in path.split(".")):
        return False
    if path.startswith("hookline."):
        return path.count(".") == 1 or _is_within(path, _HOOKS)
    return _is_within(path, _TORCH) and not _is_within(path, _EXCLUDED)


def is_default_target(path: str, target: Any, owner: Any) -> bool:
    """Return whether every config file may name this object.

    Args:
        path: its path, for which `is_default_path` is True.
        target: the object.
        owner: the module or class that it was found in.
    """
    if path.startswith("hookline."):
        return isinstance(target, type) and issubclass(target, Hook) and _is_defined(target, _HOOKS)
    if path.rpartition(".")[0] == _FUNCTIONAL and not isinstance(target, type):
        return path.rpartition(".")[2] in functional_names()
    if isinstance(target, type):
        return _is_public_class(target)
    if isinstance(owner, type):
        return _is_public_class(owner) and _is_class_method(target) and _is_defined(target, _TORCH)
    return path in _FUNCTIONS


@cache
def functional_names() -> frozenset[str]:
    """Return the names of the documented functions of `torch.nn.functional`."""
    from torch.nn import functional

    return frozenset(
        name
        for name, function in vars(functional).items()
        if not name.startswith("_")
        and isinstance(function, FunctionType | BuiltinFunctionType)
        and function.__module__ in _FUNCTIONAL_SOURCES
        and function.__doc__
    )


def _is_class_method(target: Any) -> bool:
    """Return whether this is a class method, such as `Embedding.from_pretrained`.

    Any other method would be called with a `self` that the file chooses: `ParameterDict.get` would
    return any item of anything, such as the globals of a function.
    """
    return isinstance(target, MethodType) and isinstance(target.__self__, type)


def _is_public_class(target: type) -> bool:
    return _is_defined(target, _TORCH) and not _is_defined(target, _EXCLUDED)


def _is_defined(target: Any, packages: Iterable[str]) -> bool:
    module = getattr(target, "__module__", None)
    return isinstance(module, str) and _is_within(module, packages)


def _is_within(path: str, packages: Iterable[str]) -> bool:
    return any(path == one or path.startswith(f"{one}.") for one in packages)
