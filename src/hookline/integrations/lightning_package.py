"""Lightning's packages: `lightning`, and `pytorch_lightning`, which has classes of its own."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from typing import Any

import torch

from hookline.errors import LoopError

_REFUSED = {"lightning": ("2.6.2", "2.6.3")}
"""Versions that were uploaded by somebody else and steal credentials when they are imported."""

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
"""The packages, by the name under which they are installed."""


def callback_classes() -> tuple[type, ...]:
    """Return `Callback` of each of the packages that was imported, or of one that is installed.

    Raises:
        LoopError: Neither is installed, or one is a version that must not be imported.
    """
    _refuse_versions()
    imported = [name for name in _PACKAGES.values() if name in sys.modules]
    if imported:
        return tuple(import_module(name).Callback for name in imported)
    errors: list[str] = []
    for name in _PACKAGES.values():
        try:
            return (import_module(name).Callback,)
        except ImportError as error:
            errors.append(str(error))
    raise LoopError(
        "Hooks in a Lightning Trainer need Lightning, which cannot be imported "
        f"({'; '.join(errors)}): pip install 'hookline[lightning]'."
    )


def find_package(trainer: Any) -> Any:
    """Return the package that a trainer belongs to."""
    for kind in type(trainer).__mro__:
        for name in _PACKAGES.values():
            if kind.__module__.startswith(f"{name}."):
                return import_module(name)
    raise LoopError(f"Expected a Trainer of Lightning, not a {type(trainer).__name__}.")


def _refuse_versions() -> None:
    """Raise for versions that must not be imported; this imports nothing."""
    for name, refused in _REFUSED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version in refused:
            raise LoopError(
                f"{name} {version} is installed. This version was a malicious upload that steals "
                "credentials when it is imported: remove it (pip uninstall lightning), change the "
                "credentials of this machine, and install another version: "
                "pip install 'hookline[lightning]'."
            )


def called_parts(module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return what a `training_step` calls instead of the LightningModule itself.

    These are its children with parameters: losses and metrics have none. A child that cannot be
    called, such as a `ModuleList`, stands for its own children. In a `training_step` that is
    compiled, hooks on its parts would be compiled, too: then there are none.
    """
    if hasattr(getattr(module, "training_step", None), "_torchdynamo_orig_callable"):
        return ()
    found: dict[torch.nn.Module, None] = {}
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is torch.nn.Module.forward:
            found.update(dict.fromkeys(called_parts(child)))
        else:
            found[child] = None
    return tuple(found)
