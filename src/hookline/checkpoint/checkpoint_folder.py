"""One checkpoint: a folder that is there as a whole or not at all, and is verified when read.

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
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from hookline.checkpoint.atomic_files import (
    TEMPORARY,
    hash_file,
    remove_leftovers,
    sync,
    temporary_folder,
)
from hookline.checkpoint.state_tree import Encoder, decode
from hookline.checkpoint.tensor_files import read_tensors, write_tensors
from hookline.errors import CheckpointError, listed

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "complete_checkpoints",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
]

FORMAT_VERSION = 1
_FORMAT = "hookline.checkpoint"
_FILES = ("model.safetensors", "state.safetensors", "state.json")


@dataclass
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        path: Its folder.
        info: What the manifest says about it: step, epoch, metrics, run id …
        model: The model's `state_dict`.
        state: The state as it was saved, its tensors on the CPU.
    """

    path: Path
    info: dict[str, Any]
    model: dict[str, Any]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path, *, model: Mapping[str, Tensor], state: Mapping[str, Any], info: Mapping[str, Any]
) -> Path:
    """Write a checkpoint, and return once it is durable.

    A kill at any moment leaves the whole checkpoint or none. A folder that exists is never
    touched: the new one is then called `step_000120_2`, `step_000120_3` …

    Args:
        folder: Where to write it, such as `checkpoints/step_000120`.
        model: The model's `state_dict`. Tied weights are written once.
        state: Everything else, as nested dicts, lists, tuples, numbers, strings and tensors.
            `dict`, `OrderedDict`, `Counter` and all other types come back exactly as they were.
        info: Facts for the manifest, numbers and strings. Tensors of one element become numbers.

    Returns:
        The folder that was written.

    Raises:
        CheckpointError: Something cannot be saved (nothing is written then), or the disk fails.
    """
    folder = Path(folder)
    weights = {k: v for k, v in model.items() if isinstance(v, Tensor)}
    checked = Encoder("model")
    checked.encode(weights)
    encoder = Encoder("state")
    extra = {k: v for k, v in model.items() if k not in weights}  # of `get_extra_state`
    tree = {"state": encoder.encode(dict(state)), "model": encoder.encode(extra)}
    facts = Encoder("info", numbers=True).encode(dict(info))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        with temporary_folder(folder.parent, folder.name) as parent:
            temporary = parent / folder.name
            temporary.mkdir()
            write_tensors(temporary / "model.safetensors", weights)
            write_tensors(temporary / "state.safetensors", encoder.tensors)
            _write(temporary / "state.json", json.dumps(tree, allow_nan=False))
            for name in _FILES:
                sync(temporary / name)
            _write(temporary / "manifest.json", _manifest(temporary, facts))
            sync(temporary / "manifest.json")
            sync(temporary)
            final = _rename(temporary, folder)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} could not be written: {error}. Nothing of it was left "
            "behind. Is the disk full, or the folder read-only?"
        ) from error
    return final


def load_checkpoint(path: Path, *, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint after verifying sizes and hashes of all its files.

    Args:
        path: The checkpoint's folder; `find_checkpoint` finds it from a run's folder.
        device: Where the weights go. The state's tensors stay on the CPU: random states have to,
            and optimizers move theirs to where their parameters are.

    Raises:
        CheckpointError: It is damaged, or written by a newer version; the message names the file.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for name, facts in manifest["files"].items():
        _verify(path / name, facts)
    name = ""
    try:
        name = "model.safetensors"
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
    except Exception as error:  # whatever a wrong file makes of its readers
        raise _damaged(path / name, f"cannot be read: {type(error).__name__}: {error}") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, after checking it against its own hash."""
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "is no folder" if not path.is_dir() else "has no manifest.json"
        raise CheckpointError(f"{path} {what}: it is no checkpoint.{_others(path)}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise _damaged(file, f"cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{file} is not the manifest of a checkpoint: its 'format' should be '{_FORMAT}'. "
            f"Give the folder of a checkpoint.{_others(path)}"
        )
    version = manifest.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format version {version}; this hookline reads up to version "
            f"{FORMAT_VERSION}. Install a newer hookline: pip install -U hookline"
        )
    if manifest.pop("check", None) != _check(manifest) or version != FORMAT_VERSION:
        raise _damaged(file, "does not match its own hash")
    return manifest


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder whose files are all there, oldest first."""
    found: list[tuple[str, str, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(TEMPORARY) or not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
            whole = all(
                (path / n).stat().st_size == f["size"] for n, f in manifest["files"].items()
            )
        except (CheckpointError, OSError):
            continue
        if whole:
            found.append((manifest["created"], path.name, path))
    return [path for _, _, path in sorted(found)]


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())


def _manifest(folder: Path, info: Any) -> str:
    files = {
        name: {"size": (folder / name).stat().st_size, "xxh3_64": hash_file(folder / name)}
        for name in _FILES
    }
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "files": files,
        "info": info,
    }
    return json.dumps({**manifest, "check": _check(manifest)}, indent=1, allow_nan=False) + "\n"


def _check(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _rename(temporary: Path, folder: Path) -> Path:
    for number in count(1):
        final = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        if final.exists() or final.is_symlink():
            continue
        try:
            return temporary.rename(final)
        except OSError:
            if not final.exists():  # else another process was faster
                raise
    raise AssertionError


def _verify(file: Path, facts: Mapping[str, Any]) -> None:
    try:
        size = file.stat().st_size
        if size != facts["size"]:
            raise _damaged(file, f"has {size} bytes instead of {facts['size']}")
        if hash_file(file) != facts["xxh3_64"]:
            raise _damaged(file, "has other bytes than were written (its hash differs)")
    except FileNotFoundError:
        raise _damaged(file, "is missing") from None
    except OSError as error:
        raise _damaged(file, f"cannot be read: {error}") from error


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} {what}. The checkpoint is damaged and was not loaded.{_others(file.parent)}"
    )


def _others(path: Path) -> str:
    names = [p.name for p in _beside(path)]
    if not names:
        return f" There is no other complete checkpoint in {path.parent}."
    return f" Complete ones in {path.parent}, newest first: {listed(reversed(names[-5:]))}."


def _beside(path: Path) -> list[Path]:
    """Return folders beside a checkpoint that look complete; cheap, it reads no manifest."""
    try:
        beside = [p for p in path.parent.iterdir() if p != path and p.name[0] != "."]
        whole = [p for p in beside if all((p / n).is_file() for n in ("manifest.json", *_FILES))]
        return sorted(whole, key=lambda p: (p.stat().st_mtime_ns, p.name))
    except OSError:
        return []
