"""Checkpoints whose tensors are in parts: reading them as a whole, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.checkpoint import load_checkpoint
from hookline.checkpoint.catalog import read_manifest
from hookline.checkpoint.saver import CheckpointWriter
from hookline.checkpoint.snapshot import TensorBuffer
from hookline.checkpoint.tensor_files import read_tensors
from hookline.errors import CheckpointError
from hookline.tensors.sharded import Shard

CPU = torch.device("cpu")


def write(path: Path, tensors: dict[str, Any], places: dict[str, Any]) -> Path:
    """Write a file in which some tensors have a place in a larger one: its shape and offset."""
    buffer = TensorBuffer()
    shards = {name: Shard(tensors[name], *place, True) for name, place in places.items()}
    buffer.copy(tensors, shards)
    path.write_bytes(buffer.data)
    return path


@given(
    rows=st.integers(0, 7),
    columns=st.integers(1, 3),
    cut=st.integers(0, 7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.bool]),
)
def test_parts_become_the_whole_tensor(tmp_path_factory, rows, columns, cut, dtype) -> None:
    folder = tmp_path_factory.mktemp("parts")
    cut = min(cut, rows)
    whole = torch.arange(rows * columns).reshape(rows, columns).to(dtype)
    plain = torch.ones(2)
    shape = tuple(whole.shape)
    first = write(
        folder / "model.safetensors",
        {"w": whole[:cut], "plain": plain},
        {"w": (shape, (0, 0))},
    )
    second = write(folder / "model-1.safetensors", {"w": whole[cut:]}, {"w": (shape, (cut, 0))})
    read = read_tensors(first, CPU, [second])
    assert list(read) == ["plain", "w"]
    assert torch.equal(read["w"], whole)
    assert torch.equal(read["plain"], plain)


@pytest.mark.parametrize(
    ("place", "part", "match"),
    [
        (((4, 2), (2, 0)), torch.zeros(1, 2), "shards of the tensor 'w' are missing"),
        (((4, 2), (3, 0)), torch.zeros(2, 2), "not within its whole"),
        (((4, 2), (2,)), torch.zeros(2, 2), "no valid dtype, shape and place"),
        (((1 << 60, 2), (2, 0)), torch.zeros(2, 2), "a shard of another tensor 'w'"),
        (((4, 2), (2, 0)), torch.zeros(2, 2, dtype=torch.int32), "different dtypes"),
    ],
    ids=["missing", "outside", "dimensions", "shape", "dtype"],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, place, part, match) -> None:
    first = write(tmp_path / "a.safetensors", {"w": torch.zeros(2, 2)}, {"w": ((4, 2), (0, 0))})
    second = write(tmp_path / "b.safetensors", {"w": part}, {"w": place})
    with pytest.raises(ValueError, match=match):
        read_tensors(first, CPU, [second])


def test_a_part_that_declares_a_huge_whole_allocates_nothing(tmp_path: Path) -> None:
    first = write(tmp_path / "a.safetensors", {"w": torch.zeros(2)}, {"w": ((1 << 61,), (0,))})
    with pytest.raises(ValueError, match="are missing"):
        read_tensors(first, CPU)


def test_a_part_of_a_tensor_that_rank_0_does_not_have_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.safetensors", {"w": torch.zeros(2)}, {})
    second = write(tmp_path / "b.safetensors", {"w": torch.zeros(2)}, {"w": ((4,), (2,))})
    with pytest.raises(ValueError, match="a shard of another tensor"):
        read_tensors(first, CPU, [second])


def save_parts(folder: Path, ranks: int) -> torch.Tensor:
    """Write a checkpoint as so many ranks do, each with a row of a tensor; return the tensor."""
    whole = torch.randn(ranks, 3)
    files: dict[str, memoryview] = {}
    for rank in range(ranks):
        row = whole[rank : rank + 1]
        for kind in ("model", "state"):
            buffer = TensorBuffer()
            buffer.copy({"w": row}, {"w": Shard(row, (ranks, 3), (rank, 0), True)})
            number = f"-{rank}" if rank else ""
            files[f"{kind}{number}.safetensors"] = memoryview(bytes(buffer.data))
    tree = {"state": {"w": {"$": "tensor", "v": "w"}}, "model": {}}
    CheckpointWriter(files, {}, perf_counter(), tree=tree).write(folder, move_last=False)
    return whole


def test_a_checkpoint_of_many_ranks_is_read(tmp_path: Path) -> None:
    whole = save_parts(tmp_path / "many", 130)
    checkpoint = load_checkpoint(tmp_path / "many")
    assert torch.equal(checkpoint.model["w"], whole)
    assert torch.equal(checkpoint.state["w"], whole)


def test_several_processes_verify_every_file_together(tmp_path: Path) -> None:
    save_parts(tmp_path / "all", 5)
    for name in [file.name for file in (tmp_path / "all").iterdir()]:
        path = tmp_path / "damaged" / name
        shutil.copytree(tmp_path / "all", path)
        data = bytearray((path / name).read_bytes())
        data[-1] ^= 1
        (path / name).write_bytes(data)
        refused = []
        for rank in range(3):
            try:
                read_manifest(path, verify_files=True, ranks=(rank, 3))
            except CheckpointError:
                refused.append(rank)
        assert refused == ([0, 1, 2] if name == "manifest.json" else [_number(name) % 3])


def _number(name: str) -> int:
    return int("".join(filter(str.isdecimal, name)) or 0)


def test_one_file_under_the_names_of_many_ranks_is_refused(tmp_path: Path) -> None:
    save_parts(tmp_path / "all", 3)
    (tmp_path / "all" / "model-2.safetensors").unlink()
    os.link(tmp_path / "all" / "model-1.safetensors", tmp_path / "all" / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="is the same file as"):
        load_checkpoint(tmp_path / "all")
