"""Checkpoints at URLs that anybody may have written: the good ones beside them are fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_checkpoints import change_manifest, hostile, make_template, snapshot

from hookline.checkpoint import CheckpointError
from hookline.checkpoint.remote import fetch_checkpoint

fsspec = pytest.importorskip("fsspec")

FILES = ("manifest.json", "model.safetensors", "state.json")


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return a function that replaces a file of a checkpoint with what `make` makes."""

    def change(checkpoint: Path) -> None:
        file = checkpoint / name
        file.rename(checkpoint.parents[2] / f"moved-{name}")
        make(file)

    return change


def link_to_the_same(file: Path) -> None:
    """Make a link to the file that `replaced` has moved: its contents have the right hash."""
    file.symlink_to(file.parents[3] / f"moved-{file.name}")


def make_sparse(checkpoint: Path) -> None:
    size = 1 << 42
    change_manifest(checkpoint, lambda m: m["files"]["model.safetensors"].update(size=size))
    os.truncate(checkpoint / "model.safetensors", size)


def link_folder(checkpoint: Path) -> None:
    moved = checkpoint.rename(checkpoint.parent.parent / "elsewhere")
    checkpoint.symlink_to(moved)


REFUSED: dict[str, Callable[[Path], None]] = {
    **{f"FIFO {name}": replaced(name, os.mkfifo) for name in FILES},
    **{f"link {name}": replaced(name, link_to_the_same) for name in FILES},
    **{f"folder {name}": replaced(name, Path.mkdir) for name in FILES},
    "more than the disk has": make_sparse,
    "a folder that is a link": link_folder,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_regular_file_is_not_fetched(tmp_path: Path, name: str) -> None:
    root = make_template(tmp_path / "store")
    REFUSED[name](hostile(root))
    assert fetch_checkpoint(f"file://{root}/run", tmp_path / "into").name == "step_1"
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["step_1"]
    if name != "a folder that is a link":  # one that the user names is followed
        with pytest.raises(CheckpointError):
            fetch_checkpoint(f"file://{hostile(root)}", tmp_path / "other")


def test_a_folder_of_checkpoints_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    root = make_template(tmp_path / "store")
    shutil.rmtree(root / "run" / "checkpoints")
    (root / "run" / "checkpoints").symlink_to(root / "outside")
    with pytest.raises(CheckpointError, match="No complete checkpoint"):
        fetch_checkpoint(f"file://{root}/run", tmp_path / "into")


NAMES = ["y" * 300, "a\n  \x1b[31mb", "a\0b", "a\ud800b", "last", "C:\\x", "nul", "a b", "é"]


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_of_a_fetched_checkpoint_has_a_plain_name(tmp_path: Path, name: str) -> None:
    root = make_template(tmp_path / "store")
    before = snapshot(root)
    store = fsspec.filesystem("memory")
    for file in hostile(root).iterdir():
        store.pipe(f"/hostile/{name}/{file.name}", file.read_bytes())
    try:
        path = fetch_checkpoint("memory://hostile", tmp_path / "into")
    finally:
        store.rm("/hostile", recursive=True)
    assert path.parent == tmp_path / "into"
    assert path.name.isascii()
    assert path.name.isprintable()
    assert path.name not in ("last", "nul")
    assert len(path.name) <= 101
    assert snapshot(root) == before
