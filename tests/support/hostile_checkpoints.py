"""Checkpoints as a stranger could have written them: with right hashes and wrong contents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from hookline.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from hookline.checkpoint.catalog import scan_checkpoints, verify_checkpoint
from hookline.hooks.checkpointing.upload import Bundle
from hookline.runs.checkpoint_reader import get_last_checkpoint, read_checkpoints

SECRET = "marker-7c1f-of-a-secret"


def reseal(checkpoint: Path, **fields: Any) -> None:
    """Write these fields into a manifest, with the sizes and hashes of the files as they are."""
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
    write_manifest(file, {**manifest, **fields})


def write_manifest(file: Path, manifest: Any) -> None:
    """Write a manifest with its right hash."""
    manifest.pop("check", None)
    check = xxhash.xxh3_64(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**manifest, "check": check}))


def change_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and make its hash right."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    change(manifest)
    write_manifest(checkpoint / "manifest.json", manifest)


def change_state(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Change what `state.json` has, or replace it with what is returned."""
    tree = json.loads((checkpoint / "state.json").read_text())
    changed = change(tree)
    (checkpoint / "state.json").write_text(json.dumps(tree if changed is None else changed))
    reseal(checkpoint)


def change_header(
    checkpoint: Path, change: Callable[[Any], Any], name: str = "model.safetensors"
) -> None:
    """Change the header of a safetensors file, or replace it with what is returned."""
    data = (checkpoint / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    (checkpoint / name).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    reseal(checkpoint)


def snapshot(folder: Path) -> dict[str, Any]:
    """Return the names and contents of everything in a folder, without following links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = path.readlink()
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a folder, with links as links."""
    return Path(shutil.copytree(source, target, symlinks=True))


def save(path: Path, step: int = 1) -> Path:
    """Save a checkpoint with tied weights and tensors of a dtype that safetensors lacks."""
    model = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.complex64)}
    model["tied"] = model["w"]
    state = {"text": "é", "a": torch.arange(3), "inner": {"k": (1, {2})}}
    info = {"step": step, "epoch": 0, "run_id": "run", "metrics": {"val/loss": 0.5}}
    return save_checkpoint(path, model=model, state=state, info=info)


def make_template(root: Path) -> Path:
    """Make a folder with two good checkpoints in run/checkpoints, and secrets beside the run."""
    save(root / "run" / "checkpoints" / "step_1", 1)
    save(root / "run" / "checkpoints" / "step_2", 2)
    (root / "secret.txt").write_text(SECRET)
    outside = save(root / "outside" / "step_9", 9)
    (outside / "state.json").write_text(json.dumps({"state": {"secret": SECRET}, "model": {}}))
    reseal(outside)
    return root


def hostile(root: Path) -> Path:
    """Return the checkpoint that tests change."""
    return root / "run" / "checkpoints" / "step_2"


def read_everything(run: Path, checkpoint: Path) -> list[str]:
    """Call every reader; return what they returned or raised, as texts."""
    readers: list[Callable[[], Any]] = [
        lambda: load_checkpoint(checkpoint),
        lambda: load_checkpoint(find_checkpoint(checkpoint)),
        lambda: verify_checkpoint(checkpoint),
        lambda: scan_checkpoints(checkpoint.parent),
        lambda: read_checkpoints(checkpoint.parent),
        lambda: find_checkpoint(run, verify=True),
        lambda: get_last_checkpoint(run),
        lambda: Bundle.of(checkpoint),
    ]
    texts: list[str] = []
    for reader in readers:
        try:
            result = reader()
            texts.append(str(result))
            if isinstance(result, Checkpoint):
                texts.append(f"{result.info} {result.state}")
        except CheckpointError as error:
            texts.append(str(error))
    return texts
