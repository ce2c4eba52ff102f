"""Exporting the weights of a checkpoint to one safetensors file that other libraries load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hookline.arguments import user_path
from hookline.checkpoint.atomic_files import replace_file
from hookline.checkpoint.catalog import is_checkpoint
from hookline.checkpoint.folder import Checkpoint, load_checkpoint
from hookline.errors import CheckpointError, listed
from hookline.tensors.memory import unshared


@dataclass(frozen=True)
class ExportedWeights:
    """An exported file.

    Attributes:
        path: The file.
        size: Its size in bytes.
        tensors: How many tensors it contains.
        tied: Names of tied weights that are not in the file, and the name of the tensor that is.
        left_out: Names of values that are not tensors, which are not in the file.
    """

    path: Path
    size: int
    tensors: int
    tied: dict[str, str]
    left_out: list[str]


def export_weights(
    checkpoint: Path, file: Path, *, averaged: bool = False, replace: bool = False
) -> ExportedWeights:
    """Write the weights of a checkpoint to a safetensors file, after verifying the checkpoint.

    The file appears when it is complete. Names lose the prefixes that `torch.compile` and DDP add.
    It contains tied weights once, under their first name, as transformers writes and expects them.

    Args:
        checkpoint: The checkpoint's folder.
        file: Where to write.
        averaged: Write the average that the hook EMA has kept, instead of the training weights.
        replace: Replace an existing file.
    """
    checkpoint, file = user_path(checkpoint), user_path(file)
    if is_checkpoint(file.parent):
        raise CheckpointError(f"{file.parent} is a checkpoint, which is not changed. Give another.")
    if not replace and os.path.lexists(file):
        raise CheckpointError(f"{file} exists. Give another file, or allow that it is replaced.")
    loaded = load_checkpoint(checkpoint)
    values = _remove_prefixes(loaded.model)
    weights = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if averaged:
        weights = _use_averages(weights, loaded)
    tied = _find_tied(weights)
    written = {name: value for name, value in weights.items() if name not in tied}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(file) as temporary:
            _write_safetensors(temporary, written, tied)
            size = temporary.stat().st_size
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} could not be written: {error}.") from error
    left_out = [name for name in values if name not in weights]
    return ExportedWeights(file, size, len(written), tied, left_out)


def _write_safetensors(file: Path, weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    file.touch()
    mode = file.stat().st_mode
    values = unshared({name: value.contiguous() for name, value in weights.items()})
    try:
        save_file(values, file, metadata={"format": "pt", **tied})  # sets the mode to 0600
    except KeyError as error:
        raise CheckpointError(
            f"A safetensors file cannot contain tensors of {error.args[0]}. Load the checkpoint in "
            "Python, with hookline.checkpoint.load_checkpoint(…).model."
        ) from None
    file.chmod(mode)


def _find_tied(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, for each weight that is the same tensor as an earlier one, the name of that one."""
    first_names: dict[int, str] = {}
    names = {name: first_names.setdefault(id(value), name) for name, value in weights.items()}
    return {name: first for name, first in names.items() if name != first}


def _use_averages(weights: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return weights with the averages in their place, in the weights' dtypes."""
    states = checkpoint.state.get("hooks", {})
    found = {
        name: state["averages"]
        for name, state in (states.items() if isinstance(states, dict) else ())
        if isinstance(state, dict)
        and isinstance(state.get("averages"), dict)
        and all(isinstance(weight, str) for weight in state["averages"])
    }
    if len(found) != 1:
        reason = f"several hooks have one: {listed(found)}" if found else "no EMA hook has saved it"
        raise CheckpointError(f"{checkpoint.path} has no average to export: {reason}.")
    averages: dict[str, Any] = _remove_prefixes(next(iter(found.values())))
    unknown = [
        name
        for name, average in averages.items()
        if name not in weights
        or not isinstance(average, Tensor)
        or average.shape != weights[name].shape
    ]
    if unknown:
        raise CheckpointError(
            f"The average in {checkpoint.path} does not match the weights, which lack "
            f"{listed(unknown, 5)}."
        )
    changed = {
        id(weights[name]): average.to(weights[name].dtype) for name, average in averages.items()
    }
    return {name: changed.get(id(value), value) for name, value in weights.items()}


def _remove_prefixes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, without the prefixes of `torch.compile` and DDP."""
    names = {name: name.replace("_orig_mod.", "") for name in values}
    if all(name.startswith("module.") for name in names.values()):
        names = {name: plain.removeprefix("module.") for name, plain in names.items()}
    if len(set(names.values())) < len(names):
        return dict(values)
    return {names[name]: value for name, value in values.items()}
