"""The checkpoints of a run: their metadata, and loading their weights into a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hookline.checkpoint.checkpoint_lookup import read_pointers, scan_checkpoints
from hookline.errors import CheckpointError, listed

if TYPE_CHECKING:
    import torch

    Model = TypeVar("Model", bound=torch.nn.Module)

__all__ = ["SavedCheckpoint", "describe_mismatches", "read_checkpoints"]

_PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and DDP
_MAX_SHOWN = 5


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on disk.

    Attributes:
        step: Completed steps.
        metrics: The metrics of the newest validation.
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
        """Load the weights into a model, and return it.

        All files are verified first. If they are damaged or do not match, an error names all
        differences, and the model is not changed. The prefixes that `torch.compile` and DDP add to
        names are ignored.
        """
        from hookline.checkpoint import load_checkpoint

        weights = load_checkpoint(self.path).model
        expected = model.state_dict()
        renamed = _match_names(weights, expected)
        problems = describe_mismatches(renamed, expected)
        if problems:
            raise CheckpointError(
                f"The checkpoint {self.path} does not match this {type(model).__name__}, which was "
                "not changed:\n  " + "\n  ".join(problems)
            )
        model.load_state_dict(renamed)
        return model


def read_checkpoints(folder: Path) -> tuple[list[SavedCheckpoint], list[str]]:
    """Return the complete checkpoints in a folder, oldest first, and what is wrong with others."""
    scan, pointers = scan_checkpoints(folder), read_pointers(folder)
    checkpoints: list[SavedCheckpoint] = []
    for path, manifest in scan.complete.items():
        info = manifest["info"]
        metrics = info.get("metrics") or {}
        checkpoints.append(
            SavedCheckpoint(
                path=path,
                step=info.get("step"),
                epoch=info.get("epoch"),
                metrics={name: _decode_number(value) for name, value in metrics.items()},
                created=manifest["created"],
                is_last=pointers.get("last") == path.name,
                is_best=pointers.get("best") == path.name,
            )
        )
    return checkpoints, [f"{folder.name}/{name}: {text}" for name, text in scan.damage.items()]


def _decode_number(value: Any) -> Any:
    if isinstance(value, dict) and value.get("$") == "float":  # NaN and infinities
        text = str(value.get("v"))
        return float("nan" if text.startswith("0x") else text)
    return value


def _match_names(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights under the model's names if they differ only by a wrapper's prefix."""
    names = {_remove_prefixes(name): name for name in expected}
    if len(names) == len(expected) and {_remove_prefixes(n) for n in weights} == names.keys():
        return {names[_remove_prefixes(name)]: value for name, value in weights.items()}
    return dict(weights)


def _remove_prefixes(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def describe_mismatches(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return how the names and shapes of weights differ from a model's, in a few lines."""
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    shapes = [
        f"'{name}' is {tuple(value.shape)} in the checkpoint and {tuple(expected[name].shape)} here"
        for name, value in weights.items()
        if hasattr(value, "shape") and hasattr(expected.get(name), "shape")
        if value.shape != expected[name].shape
    ]
    lines = [
        f"{owner} lacks {listed(names[:_MAX_SHOWN])}"
        + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
        for owner, names in (("the checkpoint", missing), ("the model", unknown))
        if names
    ]
    if len(shapes) > _MAX_SHOWN:
        shapes = [*shapes[:_MAX_SHOWN], f"and {len(shapes) - _MAX_SHOWN} other shapes"]
    return [*lines, *shapes]
