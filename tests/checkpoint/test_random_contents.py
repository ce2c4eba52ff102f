"""Any value and any bytes in the files of a checkpoint: an error, or a checkpoint, nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hostile_checkpoints import (
    SECRET,
    change_header,
    change_manifest,
    change_state,
    copy_folder,
    hostile,
    read_everything,
    reseal,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from odd_trees import ODD, TAGGED, paths_in, put

from hookline.checkpoint.catalog import scan_checkpoints


def only_checkpoint_errors(root: Path) -> None:
    texts = read_everything(root / "run", hostile(root))
    assert SECRET not in " ".join(texts)
    assert (
        root / "run" / "checkpoints" / "step_1" in scan_checkpoints(hostile(root).parent).complete
    )


@pytest.fixture(scope="module")
def fuzzed(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_folder(template, tmp_path_factory.mktemp("fuzzed") / "root")


FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def restore(template: Path, fuzzed: Path) -> Path:
    """Make the checkpoint good again, and return it."""
    path = hostile(fuzzed)
    for file in hostile(template).iterdir():
        shutil.copyfile(file, path / file.name)
    return path


@FUZZ
@given(value=ODD | TAGGED, data=st.data())
def test_any_value_in_a_manifest(template: Path, fuzzed: Path, value: Any, data: Any) -> None:
    path = restore(template, fuzzed)
    manifest = json.loads((path / "manifest.json").read_text())
    place = data.draw(st.sampled_from([p for p in paths_in(manifest) if p]))
    change_manifest(path, lambda m: put(m, place, value))
    only_checkpoint_errors(fuzzed)


@FUZZ
@given(value=ODD | TAGGED, data=st.data())
def test_any_value_in_a_state(template: Path, fuzzed: Path, value: Any, data: Any) -> None:
    path = restore(template, fuzzed)
    tree = json.loads((path / "state.json").read_text())
    place = data.draw(st.sampled_from(paths_in(tree)))
    change_state(path, lambda tree: put(tree, place, value))
    only_checkpoint_errors(fuzzed)


@FUZZ
@given(value=ODD, data=st.data())
def test_any_value_in_a_header(template: Path, fuzzed: Path, value: Any, data: Any) -> None:
    path = restore(template, fuzzed)
    file = data.draw(st.sampled_from(["model.safetensors", "state.safetensors"]))
    raw_header = (path / file).read_bytes()
    header = json.loads(raw_header[8 : 8 + int.from_bytes(raw_header[:8], "little")])
    place = data.draw(st.sampled_from(paths_in(header)))
    change_header(path, lambda h: put(h, place, value), file)
    only_checkpoint_errors(fuzzed)


@FUZZ
@given(
    file=st.sampled_from(["manifest.json", "model.safetensors", "state.safetensors", "state.json"]),
    cut=st.integers(0, 400),
    flip=st.integers(0, 4000),
    more=st.binary(max_size=40),
)
@example(file="model.safetensors", cut=0, flip=8, more=b"")
def test_any_bytes_with_a_right_hash(
    template: Path, fuzzed: Path, file: str, cut: int, flip: int, more: bytes
) -> None:
    path = restore(template, fuzzed)
    data = bytearray((path / file).read_bytes())
    data = data[: len(data) - cut] + more
    if data:
        data[flip % len(data)] ^= 1 << (flip % 8)
    (path / file).write_bytes(data)
    if file != "manifest.json":
        reseal(path)
    only_checkpoint_errors(fuzzed)
