"""Saving and loading one checkpoint, a folder.

step_000120/
  manifest.json       format, version, number, created, size and xxh3_64 of each file, info; its
                      own hash as `check`
  model.safetensors   weights
  state.safetensors   the state's tensors
  state.json          everything else of the state
  model-1.safetensors, state-1.safetensors, …
                      of sharded training: the shards of rank 1, …
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hookline.arguments import user_path
from hookline.checkpoint.catalog import (
    naming_damage,
    read_json,
    read_manifest,
    shard_files,
)
from hookline.checkpoint.saver import CheckpointWriter
from hookline.checkpoint.snapshot import (
    Decoder,
    SnapshotBuffers,
    decode,
    encode_info,
    encode_state,
)
from hookline.checkpoint.tensor_files import read_tensors
from hookline.files import file_limits


@dataclass
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        info: The manifest's `info`: step, epoch, metrics, run id …
        model: The model's `state_dict`, with the versions of modules in its `_metadata`.
        state: The state as it was saved, with its tensors on the CPU.
    """

    path: Path
    info: dict[str, Any]
    model: OrderedDict[str, Any]
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
    """
    begin = perf_counter()
    encoded = encode_state(model, state)
    files = SnapshotBuffers().copy(encoded)
    writer = CheckpointWriter(files, encode_info(info), begin, tree=encoded.tree)
    result = writer.write(user_path(folder), move_last=False)
    if result.error is not None:
        raise result.error
    assert result.path is not None
    return result.path


@dataclass(frozen=True)
class RankSelection:
    """Which files and tensors of a checkpoint one of several processes verifies and reads.

    Attributes:
        rank: The rank of this process.
        size: The number of processes: all of them have to read the checkpoint, and load it only if
            none of them has failed.
        find_weight: Returns the sharded tensor that a weight is loaded into, by name: of such a
            weight, only this rank's shard is read, as a `DTensor`.
        find_state: The same for a tensor of the state; its name is its path in the state, such as
            `['optimizers'][0]['state'][3]['exp_avg']`.
    """

    rank: int
    size: int
    find_weight: Callable[[str], Tensor | None]
    find_state: Callable[[str], Tensor | None]


_EVERYTHING = RankSelection(0, 1, lambda _: None, lambda _: None)


def load_checkpoint(
    path: Path, *, device: torch.device | str = "cpu", selection: RankSelection = _EVERYTHING
) -> Checkpoint:
    """Read a checkpoint after verifying the sizes and hashes of all its files.

    Args:
        path: The checkpoint's folder; `find_checkpoint` finds it from a run's folder.
        device: Where the weights go. The state's tensors stay on the CPU: random states have to,
            and optimizers move theirs to their parameters' devices.
        selection: What this process verifies and reads, if several processes do it together.
    """
    path = user_path(path)
    manifest = read_manifest(path, verify_files=True, ranks=(selection.rank, selection.size))
    with naming_damage(path, "model.safetensors"):
        shards = [path / file for file in shard_files(manifest, "model")]
        file = path / "model.safetensors"
        weights = read_tensors(file, torch.device(device), shards, selection.find_weight)
        model: OrderedDict[str, Any] = OrderedDict(weights)
    with naming_damage(path, "state.safetensors"):
        shards = [path / file for file in shard_files(manifest, "state")]
        file = path / "state.safetensors"
        decoder = Decoder(read_tensors(file, torch.device("cpu"), shards, selection.find_state))
    with naming_damage(path, "state.json"):
        tree = read_json(path / "state.json", file_limits.state_bytes)
        state = _expect_mapping(decoder.decode(tree["state"]), "state")
        model.update(_expect_mapping(decoder.decode(tree["model"]), "model"))
        if "metadata" in tree:  # older checkpoints do not have it
            model._metadata = _read_versions(decoder.decode(tree["metadata"]))  # type: ignore[attr-defined]
    with naming_damage(path, "manifest.json"):
        info = decode(manifest["info"], {})
    return Checkpoint(path, info, model, state)


def _expect_mapping(value: Any, section: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"'{section}' is not a mapping with names")
    return value


def _read_versions(value: Any) -> dict[str, Any]:
    """Return the versions of modules, which modules compare with numbers when they load."""
    versions = _expect_mapping(value, "metadata")
    for name in versions:
        found = _expect_mapping(versions[name], f"metadata of {name}").get("version")
        if found is not None and type(found) is not int:
            raise TypeError(f"the version of '{name}' is not a number")
    return versions
