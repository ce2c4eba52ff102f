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
    make_template,
    read_everything,
    reseal,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hookline.checkpoint.checkpoint_lookup import scan_checkpoints

ODD: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "$", "t0", "0x7ff8", "model.safetensors", "float", "tensor"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["$", "v", "dtype", "shape", "size", "step"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
KINDS = st.sampled_from(
    (
        *("int", "float", "complex", "str", "bytes", "tuple", "Size", "set", "frozenset", "dict"),
        *("OrderedDict", "Counter", "dtype", "device", "tensor", "numpy", "ndarray", "x"),
    )
)
TAGGED = st.fixed_dictionaries(
    {"$": KINDS, "v": ODD},
    optional={"dtype": ODD | st.sampled_from(["<i8", "|O"]), "shape": ODD},
)


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values in a tree."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [at, *(place for key, inner in items for place in paths_in(inner, (*at, key)))]


def put(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Replace the value at a place; return the tree."""
    if not place:
        return value
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return tree


def only_checkpoint_errors(root: Path) -> None:
    texts = read_everything(root / "run", hostile(root))
    assert SECRET not in " ".join(texts)
    assert (
        root / "run" / "checkpoints" / "step_1" in scan_checkpoints(hostile(root).parent).complete
    )


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


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
