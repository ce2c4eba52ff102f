"""Saving and loading one checkpoint, a folder.

step_000120/
  manifest.json       format, version, created, size and xxh3_64 of each file, info; its own
                      hash as `check`
  model.safetensors   weights
  state.safetensors   the state's tensors
  state.json          everything else of the state
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hookline.checkpoint.atomic_files import hash_file, remove_leftovers, sync, temporary_folder
from hookline.checkpoint.checkpoint_lookup import (
    FORMAT,
    FORMAT_VERSION,
    damage_error,
    hash_manifest,
    read_manifest,
)
from hookline.checkpoint.state_tree import Encoder, decode
from hookline.checkpoint.tensor_files import read_tensors, write_tensors
from hookline.errors import CheckpointError

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]

_FILES = ("model.safetensors", "state.safetensors", "state.json")


@dataclass
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        info: The manifest's `info`: step, epoch, metrics, run id …
        model: The model's `state_dict`.
        state: The state as it was saved, with its tensors on the CPU.
    """

    path: Path
    info: dict[str, Any]
    model: dict[str, Any]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path, *, model: Mapping[str, Tensor], state: Mapping[str, Any], info: Mapping[str, Any]
) -> Path:
    """Write a checkpoint, and return its folder once it is durable.

    A crash at any time leaves the complete checkpoint or none. An existing folder is never changed:
    the new checkpoint is then called `step_000120_2`, `step_000120_3` …

    Args:
        folder: Where to write it, such as `checkpoints/step_000120`.
        model: The model's `state_dict`. Tied weights are written once.
        state: Everything else, as nested dicts, lists, tuples, numbers, strings and tensors.
            `dict`, `OrderedDict`, `Counter` and all other types are restored exactly.
        info: Numbers and strings for the manifest. Tensors with one element become numbers.

    Raises:
        CheckpointError: A value cannot be saved (then nothing is written), or the disk fails.
    """
    folder = Path(folder)
    weights = {k: v for k, v in model.items() if isinstance(v, Tensor)}
    Encoder("model").encode(weights)  # raises if a weight cannot be saved
    encoder = Encoder("state")
    extra = {k: v for k, v in model.items() if k not in weights}  # from `get_extra_state`
    tree = {"state": encoder.encode(dict(state)), "model": encoder.encode(extra)}
    encoded_info = Encoder("info", numbers_only=True).encode(dict(info))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        with temporary_folder(folder.parent, folder.name) as parent:
            temporary = parent / folder.name
            temporary.mkdir()
            write_tensors(temporary / "model.safetensors", weights)
            write_tensors(temporary / "state.safetensors", encoder.tensors)
            (temporary / "state.json").write_bytes(json.dumps(tree, allow_nan=False).encode())
            for name in _FILES:
                sync(temporary / name)
            manifest = _encode_manifest(temporary, encoded_info)
            (temporary / "manifest.json").write_bytes(manifest.encode())
            sync(temporary / "manifest.json")
            sync(temporary)
            final = _rename(temporary, folder)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} could not be written: {error}. No partial files were left. "
            "Check that the folder is writable and the disk is not full."
        ) from error
    return final


def load_checkpoint(path: Path, *, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint after verifying the sizes and hashes of all its files.

    Args:
        path: The checkpoint's folder; `find_checkpoint` finds it from a run's folder.
        device: Where the weights go. The state's tensors stay on the CPU: random states have to,
            and optimizers move theirs to their parameters' devices.

    Raises:
        CheckpointError: The checkpoint is damaged, or written by a newer version. The message names
            the file.
    """
    path = Path(path)
    manifest = read_manifest(path, verify_files=True)
    name = "model.safetensors"
    try:
        model: dict[str, Any] = dict(read_tensors(path / name, torch.device(device)))
        name = "state.safetensors"
        tensors = read_tensors(path / name, torch.device("cpu"))
        name = "state.json"
        tree = json.loads((path / name).read_bytes())
        state = decode(tree["state"], tensors)
        model.update(decode(tree["model"], tensors))
        name = "manifest.json"
        return Checkpoint(path, decode(manifest["info"], {}), model, state)
    except CheckpointError:
        raise
    except Exception as error:  # a file with the right hash may still have the wrong content
        problem = f"cannot be read: {type(error).__name__}: {error}"
        raise damage_error(path, name, problem) from error


def _encode_manifest(folder: Path, info: Any) -> str:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "files": {
            name: {"size": (folder / name).stat().st_size, "xxh3_64": hash_file(folder / name)}
            for name in _FILES
        },
        "info": info,
    }
    manifest["check"] = hash_manifest(manifest)
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"


def _rename(temporary: Path, folder: Path) -> Path:
    for number in count(1):
        final = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        if final.exists() or final.is_symlink():
            continue
        try:
            return temporary.rename(final)
        except OSError:
            if not final.exists():  # otherwise another process took the name
                raise
    raise AssertionError
