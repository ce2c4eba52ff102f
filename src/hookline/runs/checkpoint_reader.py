"""The checkpoints of a run that is read: what they are, and their weights into a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hookline.errors import CheckpointError, listed

if TYPE_CHECKING:
    import torch

    Model = TypeVar("Model", bound=torch.nn.Module)

__all__ = ["SavedCheckpoint", "differences", "saved_checkpoints"]

_PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and of DDP
_SHOWN = 5


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on disk.

    Attributes:
        path: Its folder.
        step: Completed steps.
        epoch: The epoch it was saved in.
        metrics: The newest validation's.
        created: When it was saved, in UTC.
        is_last: Whether the run's pointer `last` names it.
        is_best: Whether the run's pointer `best` names it.
    """

    path: Path
    step: int | None
    epoch: int | None
    metrics: dict[str, Any]
    created: str
    is_last: bool = False
    is_best: bool = False

    def load_into(self, model: Model) -> Model:
        """Give a model these weights, and return it.

        All files are verified first. A model that does not fit is left as it was. Names that
        `torch.compile` or DDP have lengthened fit those that they were made from.

        Raises:
            CheckpointError: The checkpoint is damaged, or does not fit; all differences are named.
        """
        from hookline.checkpoint import load_checkpoint

        weights = load_checkpoint(self.path).model
        here = model.state_dict()
        fitting = _renamed(weights, here)
        problems = differences(fitting, here)
        if problems:
            raise CheckpointError(
                f"The checkpoint {self.path} does not fit this {type(model).__name__}, which was "
                "left as it was:\n  " + "\n  ".join(problems)
            )
        model.load_state_dict(fitting)
        return model


def saved_checkpoints(folder: Path) -> tuple[list[SavedCheckpoint], list[str]]:
    """Return the whole checkpoints in a folder, oldest first, and what is wrong with others.

    Only sizes are looked at: hashes are verified when a checkpoint is loaded.
    """
    found: list[SavedCheckpoint] = []
    damage: list[str] = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return [], []  # a run need not have any
    named = {name: _pointed(folder / name) for name in ("last", "best")}
    for path in paths:
        if path.name.startswith("."):
            continue  # being written
        try:
            found.append(_read(path, named))
        except _Damaged as error:
            damage.append(f"checkpoints/{path.name}: {error}")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            damage.append(f"checkpoints/{path.name}: its manifest cannot be read: {error!r}")
    return sorted(found, key=lambda one: (one.created, one.path.name)), damage


class _Damaged(Exception):  # noqa: N818 (it never leaves this file)
    pass


def _read(path: Path, named: Mapping[str, str | None]) -> SavedCheckpoint:
    file = path / "manifest.json"
    if not file.is_file():
        raise _Damaged("it has no manifest.json")
    manifest = json.loads(file.read_bytes())
    for name, facts in manifest["files"].items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None:
            raise _Damaged(f"{name} is missing")
        if size != facts["size"]:
            raise _Damaged(f"{name} has {size} bytes instead of {facts['size']}")
    info = manifest["info"]
    return SavedCheckpoint(
        path=path,
        step=info.get("step"),
        epoch=info.get("epoch"),
        metrics={name: _value(value) for name, value in (info.get("metrics") or {}).items()},
        created=manifest["created"],
        is_last=named["last"] == path.name,
        is_best=named["best"] == path.name,
    )


def _value(value: Any) -> Any:
    """Return a metric; those that JSON has no number for are written as an object."""
    if isinstance(value, dict) and value.get("$") == "float":
        text = str(value.get("v"))
        return float("nan" if text.startswith("0x") else text)
    return value


def _pointed(pointer: Path) -> str | None:
    try:
        return pointer.read_text(errors="replace").strip()
    except OSError:
        return None


def _renamed(weights: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights under the model's names, where only a wrapper's prefix tells them apart."""
    short = {_short(name): name for name in here}
    if len(short) == len(here) and {_short(name) for name in weights} == short.keys():
        return {short[_short(name)]: value for name, value in weights.items()}
    return dict(weights)


def _short(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def differences(weights: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return in which names and shapes weights differ from those of a model, in a few lines."""
    missing = [name for name in here if name not in weights]
    unknown = [name for name in weights if name not in here]
    shapes = [
        f"'{name}' is {tuple(value.shape)} in the checkpoint and {tuple(here[name].shape)} here"
        for name, value in weights.items()
        if hasattr(value, "shape") and hasattr(here.get(name), "shape")
        if value.shape != here[name].shape
    ]
    lines: list[str] = []
    if missing:
        lines.append(f"the checkpoint lacks {_some(missing)}")
    if unknown:
        lines.append(f"the model lacks {_some(unknown)}")
    if len(shapes) > _SHOWN:
        shapes = [*shapes[:_SHOWN], f"and {len(shapes) - _SHOWN} other shapes"]
    return [*lines, *shapes]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return listed(names[:_SHOWN]) + more
