"""Parts of Lightning: its packages, the modules that a step calls, the checkpoints it writes.

`Trainer.save_checkpoint` writes every checkpoint, those of `ModelCheckpoint` included, and no
callback is called after it. So this method is wrapped on the trainer while it trains, and
`remove_checkpoint` on its strategy.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hookline.checkpoint.atomic_files import sync
from hookline.errors import LoopError
from hookline.loop.patches import WrappedMethods

log = logging.getLogger("hookline")

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # each has classes of its own


def callback_classes() -> tuple[type, ...]:
    """Return `Callback` of each of the packages that was imported, or of one that is installed.

    Raises:
        LoopError: Neither is installed.
    """
    imported = [name for name in _PACKAGES if name in sys.modules]
    if imported:
        return tuple(import_module(name).Callback for name in imported)
    errors: list[str] = []
    for name in _PACKAGES:
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
        for name in _PACKAGES:
            if kind.__module__.startswith(f"{name}."):
                return import_module(name)
    raise LoopError(f"Expected a Trainer of Lightning, not a {type(trainer).__name__}.")


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


class SavedCheckpoints:
    """The checkpoints that a trainer has written, until they are taken.

    Args:
        trainer: the trainer.
        where: returns the step and the epoch of a checkpoint that is saved now.
    """

    def __init__(self, trainer: Any, where: Callable[[], tuple[int, int | None]]) -> None:
        self._trainer, self._where = trainer, where
        self._saved: list[tuple[str, int, int | None]] = []  # path, step, epoch
        self._wrapped = WrappedMethods()
        self._wrapped.wrap(trainer, "save_checkpoint", self._save)
        self._wrapped.wrap(trainer.strategy, "remove_checkpoint", self._remove)

    def take(self) -> list[tuple[str, int, int | None]]:
        """Return the checkpoints that were completed since the last call."""
        taken, self._saved = self._saved, []
        return taken

    def detach(self) -> None:
        """Put the methods back."""
        self._wrapped.restore()

    def _save(self, save: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        path, where = os.fspath(filepath), self._where()
        result = save(filepath, *args, **kwargs)
        if self._trainer.is_global_zero:
            _flush(Path(path))
        self._saved.append((path, *where))
        return result

    def _remove(self, remove: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Forget a checkpoint that was only for a moment, as that of `LearningRateFinder`."""
        path = os.fspath(filepath)
        self._saved = [each for each in self._saved if each[0] != path]
        return remove(filepath, *args, **kwargs)


def writes_in_background(plugin: Any) -> bool:
    """Return whether a checkpoint plugin is, or wraps, an `AsyncCheckpointIO`."""
    while plugin is not None:
        if any(kind.__name__ == "AsyncCheckpointIO" for kind in type(plugin).__mro__):
            return True
        plugin = getattr(plugin, "checkpoint_io", None)
    return False


def _flush(path: Path) -> None:
    """Flush a checkpoint, a file or a folder, to the disk; nothing for one that is elsewhere."""
    try:
        if not path.exists():
            return
        for each in (*path.rglob("*"), path, path.parent):
            sync(each)
    except OSError as error:
        log.warning("%s may not be on the disk yet: %s", path, error)
