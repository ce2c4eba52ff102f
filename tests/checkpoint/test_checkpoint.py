"""Checkpoints: what is saved comes back exactly, whole or not at all, and damage is noticed."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
from collections import Counter, OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leftovers import UnfinishedWriter, leave_unfinished_folder
from loops import batches, make_trainer
from torch import nn

import hookline
import hookline.checkpoint
from hookline.checkpoint import (
    CheckpointError,
    CheckpointSaver,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    set_pointer,
)
from hookline.context import LazyFloat, Metrics
from hookline.runs.checkpoint_reader import read_checkpoints

FILES = ("manifest.json", "model.safetensors", "state.safetensors", "state.json")


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return all(map(same, a.keys(), b.keys())) and (
            len(a) == len(b) and all(map(same, a.values(), b.values()))
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def raw(tensor: torch.Tensor) -> list[int]:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def save(folder: Path, state: Any = None, model: Any = None, **info: Any) -> Path:
    return save_checkpoint(folder, model=model or {}, state=state or {}, info=info)


def back(tmp_path: Path, value: Any) -> Any:
    path = save(tmp_path / "checkpoints" / "step_000001", {"x": value})
    loaded = load_checkpoint(path).state["x"]
    shutil.rmtree(path)
    return loaded


# -- what comes back ------------------------------------------------------------------------------

DTYPES = sorted(
    {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and d.itemsize and "q" not in str(d)
    },
    key=str,
)


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    data = torch.arange(size, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    try:
        return data.view(dtype).reshape(shape)
    except RuntimeError:  # torch itself cannot make one
        return torch.zeros(1)


def test_tensors_of_every_dtype_and_shape_come_back(tmp_path: Path) -> None:
    shapes = [(), (0,), (3,), (2, 0, 3), (2, 4)]
    tensors = {f"{dtype} {s}": make_tensor(dtype, s) for dtype in DTYPES for s in shapes}
    loaded = load_checkpoint(save(tmp_path / "a", {"x": list(tensors.values())}, tensors))
    assert same(loaded.state["x"], list(tensors.values()))
    assert same([loaded.model[name] for name in tensors], list(tensors.values()))


def test_views_shared_and_conjugated_tensors_come_back_equal(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    number = torch.tensor([1 + 2j, 3 - 1j])
    state = {
        "base": base,
        "again": base,
        "transposed": base.t(),
        "row": base[1],
        "expanded": base[:1].expand(5, 4),
        "strided": base[:, ::2],
        "conjugate": number.conj(),
        "negative": number.conj().imag,
        "number": number,
    }
    assert same(back(tmp_path, state), state)


def test_loaded_tensors_do_not_live_in_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {"x": torch.ones(1000)}, {"w": torch.ones(1000)})
    loaded = load_checkpoint(path)
    for name in ("model.safetensors", "state.safetensors"):
        os.truncate(path / name, 0)  # a mapped file would now be a bus error
    assert loaded.state["x"].sum() == loaded.model["w"].sum() == 1000
    loaded.state["x"].add_(1)


class Enumerated(Enum):
    A = 1


class Pair(NamedTuple):
    a: int
    b: int


VALUES = [
    None,
    True,
    -(2**63),
    2**63,
    -(7**9000),
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    -math.nan,
    struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0],
    5e-324,
    complex(math.nan, -0.0),
    "a\x00é😀",
    "\ud83d\ude00",  # two halves, not one sign
    b"\x00\xff",
    (1, [2, (3,)], {}),
    {7**9000: 0, 1: "a", "1": "b", (1, "x"): None, None: 0, 2.5: 1, b"k": 2},
    {"$": "tensor", "v": "t0"},
    {"\ud800": 1},
    OrderedDict([("b", 1), ("a", 2)]),
    Counter({3: 2, 1: 1}),
    {1, "a", (2, 3)},
    frozenset([b"x"]),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    np.float32(1.5),
    np.float64("nan"),
    np.int8(-3),
    np.bool_(True),
    np.str_("ü"),
    np.datetime64("2026-01-01"),
    np.arange(6, dtype=">u2").reshape(2, 3),
    np.array(1.0),
    np.empty((0, 2), dtype="complex128"),
    np.array(["a", "bcd"]),
    np.arange(12).reshape(3, 4).T,
]


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    loaded = back(tmp_path, VALUES)
    wrong = [saved for saved, found in zip(VALUES, loaded, strict=True) if not same(found, saved)]
    assert not wrong


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
)
KEYS = (
    st.integers()
    | st.text(st.characters())
    | st.just("$")
    | st.booleans()
    | st.tuples(st.integers(), st.text())
)
TENSORS = st.builds(
    lambda data, dtype, shape: torch.tensor(data * math.prod(shape), dtype=dtype).reshape(shape),
    st.lists(st.integers(0, 100), min_size=1, max_size=1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.uint8]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
ARRAYS = st.builds(
    lambda data, dtype: np.array(data, dtype=dtype),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from(["<f4", ">i8", "?", "<c16"]),
)
TREES = st.recursive(
    SCALARS | TENSORS | ARRAYS | st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=TREES)
def test_random_trees_come_back_exactly(tmp_path: Path, tree: Any) -> None:
    assert same(back(tmp_path, tree), tree)


def test_lazy_numbers_and_parameters_are_saved_as_what_they_stand_for(tmp_path: Path) -> None:
    state = [LazyFloat(torch.tensor(0.5)), Metrics({"a": torch.tensor(2.0)}), nn.Parameter(ONE)]
    loaded = back(tmp_path, state)
    assert same(loaded, [0.5, {"a": 2.0}, ONE])


ONE = torch.ones(2)


class Odd:
    pass


class OddInt(int):
    pass


UNSUPPORTED = [
    Odd(),
    len,
    lambda: 0,
    Enumerated.A,
    Pair(1, 2),
    OddInt(3),
    Path("a"),
    torch.ones(2).to_sparse(),
    torch.ones(2, device="meta"),
    np.array([Odd()]),
    np.zeros(2, dtype=[("a", "i4")]),
    torch.Generator(),
]


def test_what_cannot_be_saved_is_named_with_its_place_before_anything_is_written(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints" / "step_000001"
    for value in UNSUPPORTED:
        with pytest.raises(CheckpointError, match=r"state\['hooks'\]\['ema'\]\[1\]\['x'\]"):
            save(folder, {"hooks": {"ema": [0, {"x": value}]}})
    assert not folder.parent.exists()


def test_odd_keys_loops_weights_and_info_are_refused_too(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    for state, message in (({"a": {Odd(): 1}}, r"state\['a'\] has a key"), ({"a": loop}, "itself")):
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path / "a", state)
    with pytest.raises(CheckpointError, match=r"model\['w'\].*sparse"):
        save(tmp_path / "a", model={"w": torch.ones(2).to_sparse()})
    with pytest.raises(CheckpointError, match=r"info\['loss'\].*shape \(2,\)"):
        save(tmp_path / "a", loss=torch.ones(2))
    assert not list(tmp_path.iterdir())


def test_info_comes_back_with_numbers_read(tmp_path: Path) -> None:
    metrics = Metrics({"val/loss": torch.tensor(0.25), "nan": math.nan})
    path = save(tmp_path / "a", step=120, epoch=2, run_id="r", metrics=metrics, t=torch.tensor(3))
    info = load_checkpoint(path).info
    metrics_back = {"val/loss": 0.25, "nan": math.nan}
    assert same(info, {"step": 120, "epoch": 2, "run_id": "r", "metrics": metrics_back, "t": 3})
    assert json.loads((path / "manifest.json").read_text())["info"]["step"] == 120


# -- models and training --------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rope", torch.polar(torch.ones(4), torch.arange(4.0)))

    def get_extra_state(self) -> Any:
        return {"seen": 7}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_tied_weights_are_written_once_and_load_into_the_model(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    path = save_checkpoint(tmp_path / "a", model=model.state_dict(), state={}, info={})
    assert (path / "model.safetensors").stat().st_size < 2 * 100 * 16 * 4
    other.load_state_dict(load_checkpoint(path).model)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.extra == {"seen": 7}
    assert other.head.weight is other.embed.weight


# -- whole or not at all --------------------------------------------------------------------------


def test_the_temporary_folder_of_another_process_is_removed_only_once_it_is_dead(
    tmp_path: Path,
) -> None:
    writer = UnfinishedWriter(tmp_path, "step_000001")
    save(tmp_path / "step_000002")
    set_pointer(tmp_path, "last", tmp_path / "step_000002")
    assert (writer.folder / "step_000001" / "model.safetensors").read_bytes() == b"half"
    writer.die()
    assert writer.folder.exists()
    save(tmp_path / "step_000003")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step_000002", "step_000003"]


def test_the_leftover_of_a_dead_process_is_removed_with_everything_in_it(tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("keep")
    left = leave_unfinished_folder(tmp_path, "step_000001")
    (left / "link").symlink_to(tmp_path / "outside.txt")
    (left / "step_000001" / "folder").symlink_to(tmp_path)
    save(tmp_path / "step_000002")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside.txt", "step_000002"]
    assert (tmp_path / "outside.txt").read_text() == "keep"


def test_files_and_folders_that_only_look_like_leftovers_are_kept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    left = leave_unfinished_folder(elsewhere, "step_000001")  # has our marker
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (
        ".tmp-notes.txt",
        ".tmp-manifest.json-0123abcd",
        ".tmp-notes-0123abcd.hookline",
        ".tmp-x-0123abcd",
        "tmp-a-0123abcd.hookline",
    ):
        (folder / name).write_text("keep")
    for name in (
        ".tmp-data",
        ".tmp-step_000001-0123abcd",
        ".tmp-step_000001-0123abcg.hookline",
        ".tmp-step_000001-0123abcd.hookline.d",
        ".tmp-step_000001-0123abcd.hookline",  # the form of ours, but no marker
    ):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text("keep")
    for name in (".tmp-data-with-our-marker", ".tmp-step_000001-0123456.hookline"):
        shutil.copytree(left, folder / name)
    (folder / ".tmp-link-0123abcd.hookline").symlink_to(left)
    linked = folder / ".tmp-linked-0123abcd.hookline"
    linked.mkdir()
    (linked / ".hookline-writer").symlink_to(left / ".hookline-writer")
    before = sorted((p, p.is_symlink()) for p in tmp_path.rglob("*"))
    saved = save(folder / "mine")
    set_pointer(folder, "last", saved)
    new = set(tmp_path.rglob("*")) - {p for p, _ in before}
    assert new == {saved, folder / "last", *(saved / name for name in FILES)}
    assert all(p.is_symlink() == link and (link or p.exists()) for p, link in before)


def test_without_file_locks_checkpoints_are_saved_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave_unfinished_folder(tmp_path, "step_000001")

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", unsupported)
    save(tmp_path / "step_000002")
    assert sorted(p.name for p in tmp_path.iterdir()) == [left.name, "step_000002"]
    assert (left / ".hookline-writer").exists()
    monkeypatch.undo()
    save(tmp_path / "step_000003")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    paths = [save(tmp_path / "step_000001", {"n": n}) for n in range(3)]
    assert [p.name for p in paths] == ["step_000001", "step_000001_2", "step_000001_3"]
    assert [load_checkpoint(p).state["n"] for p in paths] == [0, 1, 2]


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    save(tmp_path / "step_000001")
    return save(tmp_path / "step_000002", {"a": torch.ones(3), "b": 1}, {"w": ONE}, step=2)


def test_a_newer_version_and_foreign_folders_say_what_to_do(good: Path, tmp_path: Path) -> None:
    manifest = json.loads((good / "manifest.json").read_text())
    (good / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(CheckpointError, match=r"format version 2.*pip install -U"):
        load_checkpoint(good)
    (good / "manifest.json").write_text('{"run_id": 1}')
    with pytest.raises(CheckpointError, match="not the manifest of a checkpoint"):
        load_checkpoint(good)
    (good / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        load_checkpoint(good)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_checkpoint(tmp_path / "nowhere")


# -- finding --------------------------------------------------------------------------------------


def test_finding_by_checkpoint_run_folder_and_pointer(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (tmp_path / "manifest.json").write_text("{}")  # a run has one too
    first, second, third = (save(folder / f"step_00000{n}") for n in (3, 1, 2))
    assert find_checkpoint(first) == first
    assert find_checkpoint(tmp_path) == find_checkpoint(str(folder)) == third  # the newest
    set_pointer(folder, "last", second)
    set_pointer(folder, "best", first)
    assert (folder / "last").read_text() == "step_000001\n"
    assert find_checkpoint(folder / "last") == second
    assert find_checkpoint(folder / "best") == first
    assert find_checkpoint(tmp_path) == third  # manifests decide; the process may have died before


def test_a_pointer_to_nothing_falls_back_to_the_newest_complete_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (save(tmp_path / f"step_00000{n}") for n in (1, 2, 3))
    set_pointer(tmp_path, "last", third)
    shutil.rmtree(third)
    (second / "state.json").unlink()
    assert find_checkpoint(tmp_path) == first
    assert "step_000003" in caplog.text
    with pytest.raises(CheckpointError, match=r"names 'step_000003'.*'step_000001'"):
        find_checkpoint(tmp_path / "last")


def test_finding_nothing_says_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="s3://bucket/run is a URL"):
        find_checkpoint("s3://bucket/run")
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"Found there: 'notes\.txt'"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        find_checkpoint(tmp_path / "notes.txt")
    damaged = save(tmp_path / "step_000001")
    (damaged / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        find_checkpoint(damaged)


# -- no code in files -----------------------------------------------------------------------------


def test_nothing_pickles_and_plain_readers_read_the_files(tmp_path: Path) -> None:
    package = Path(hookline.checkpoint.__file__).parent
    for source in package.glob("*.py"):
        text = source.read_text()
        assert not any(word in text for word in ("pickle", "torch.load", "torch.save", "eval("))
    from safetensors.torch import load_file

    path = save(tmp_path / "a", {"x": [torch.arange(3)], "n": 5}, {"w": ONE})
    assert same(load_file(path / "model.safetensors"), {"w": ONE})
    tree = json.loads((path / "state.json").read_text())["state"]
    assert tree == {"x": [{"$": "tensor", "v": "t0"}], "n": 5}
    assert same(load_file(path / "state.safetensors")["t0"], torch.arange(3))


class Versioned(torch.nn.Linear):
    """A module that converts the weights of its older versions, which had another scale."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_get_the_version_that_their_weights_were_saved_with(tmp_path):
    model, other = nn.Sequential(Versioned(2, 2)), nn.Sequential(Versioned(2, 2))
    save_checkpoint(tmp_path / "one", model=model.state_dict(), state={}, info={})
    (saved,), _ = read_checkpoints(tmp_path)
    for target in (other, nn.ModuleDict({"module": other})):
        for strict in (True, False):
            nn.init.zeros_(other[0].weight)
            saved.load_into(target, strict=strict)
            assert torch.equal(other[0].weight, model[0].weight)


def test_a_resumed_trainer_loads_weights_with_their_version(tmp_path):
    def trained(epochs, resume_from=None):
        torch.manual_seed(0)
        trainer = make_trainer(model=nn.Sequential(Versioned(8, 4)), max_epochs=epochs)
        return trainer.fit(batches(3), resume_from=resume_from)

    path = trained(1).save_checkpoint(tmp_path / "saved")
    resumed, straight = trained(2, path), trained(2)
    assert torch.equal(resumed.model[0].weight, straight.model[0].weight)


@pytest.mark.parametrize("name", ["__metadata__", "weight\ud800"])
def test_a_weight_with_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="Rename"):
        save_checkpoint(tmp_path / "one", model={name: torch.ones(1)}, state={}, info={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".hidden", "last", "best"])
def test_a_checkpoint_is_found_whatever_name_was_asked_for(tmp_path, name):
    saver = CheckpointSaver(background=False)
    for _ in range(2):
        saver.save([tmp_path / name], model={}, state={}, info={})
    results = saver.finished()
    assert [(r.requested, r.error) for r in results] == [(tmp_path / name, None)] * 2
    assert [r.path.name for r in results] == [f"_{name}", f"_{name}_2"]
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "last") == results[1].path
