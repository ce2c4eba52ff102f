"""Checkpoints whose tensors are in parts: reading them as a whole, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.checkpoint.tensor_files import TensorBuffer
from hookline.checkpoint.tensor_reading import read_tensors
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
        (((4, 2), (2, 0)), torch.zeros(1, 2), "parts of the tensor 'w' are missing"),
        (((4, 2), (3, 0)), torch.zeros(2, 2), "not a part of its whole"),
        (((4, 2), (2,)), torch.zeros(2, 2), "not a part of its whole"),
        (((1 << 60, 2), (2, 0)), torch.zeros(2, 2), "a part of another tensor 'w'"),
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
    with pytest.raises(ValueError, match="a part of another tensor"):
        read_tensors(first, CPU, [second])
