"""Checkpoints from strangers: they are refused with an error, and harm nothing beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from commands import run_hookline
from hostile_checkpoints import (
    SECRET,
    change_header,
    change_manifest,
    change_state,
    copy_folder,
    hostile,
    read_everything,
    reseal,
    save,
    snapshot,
)

from hookline.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from hookline.checkpoint.catalog import scan_checkpoints
from hookline.checkpoint.retention import Retention, remove_checkpoint
from hookline.files import file_limits
from hookline.hooks.checkpointing.upload import Bundle, Destination
from hookline.runs.checkpoint_reader import get_last_checkpoint

SECRET_SIZE = len(SECRET)
needs_links = pytest.mark.skipif(os.name == "nt", reason="links and FIFOs of POSIX")


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return copy_folder(template, tmp_path / "root")


# -- the corpus -----------------------------------------------------------------------------------


def in_files(name: str, size: Any = SECRET_SIZE, hashed: Any = None) -> Callable[[Path], None]:
    own = xxhash.xxh3_64_hexdigest(SECRET.encode())
    facts = {"size": size, "xxh3_64": own if hashed is None else hashed}
    return lambda path: change_manifest(path, lambda m: m["files"].update({name: facts}))


def in_manifest(**fields: Any) -> Callable[[Path], None]:
    return lambda path: change_manifest(path, lambda m: m.update(fields))


def in_info(**fields: Any) -> Callable[[Path], None]:
    return lambda path: change_manifest(path, lambda m: m["info"].update(fields))


def in_tree(**fields: Any) -> Callable[[Path], None]:
    return lambda path: change_state(path, lambda tree: tree.update(fields))


def in_state(value: Any) -> Callable[[Path], None]:
    return lambda path: change_state(path, lambda tree: tree["state"].update(evil=value))


def in_tensor(**fields: Any) -> Callable[[Path], None]:
    return lambda path: change_header(path, lambda header: header["w"].update(fields))


def in_metadata(**fields: Any) -> Callable[[Path], None]:
    texts = {
        f"hookline.{name}": value if isinstance(value, list) else json.dumps(value)
        for name, value in fields.items()
    }
    return lambda path: change_header(path, lambda header: header["__metadata__"].update(texts))


def raw(name: str, data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).write_bytes(data)
        if name != "manifest.json":
            reseal(path)

    return change


def linked(name: str) -> Callable[[Path], None]:
    """Make a file a link to the file of a checkpoint outside, with its size and hash."""

    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(path.parents[2] / "outside" / "step_9" / name)
        if name != "manifest.json":
            reseal(path)

    return change


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return change


def link_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parents[2] / "outside" / "step_9")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


TYPED = {"$": "tensor", "v": "t0"}
BYTES = b"\x00" * 64
HOSTILE: dict[str, Callable[[Path], None]] = {
    # names in the manifest
    "a file outside": in_files("../../../secret.txt"),
    "a file two folders up": in_files("../../../../secret.txt"),
    "an absolute file": in_files("/etc/hostname"),
    "a file with a backslash": in_files("..\\secret.txt"),
    "a file with NUL": in_files("a\0b"),
    "the folder itself": in_files("."),
    "the manifest itself": in_files("manifest.json"),
    "a hidden file": in_files(".hookline-writer"),
    "a name of a million characters": in_files("x" * 1_000_000),
    "a run outside": in_info(run_id="../../outside"),
    "a run that is a number": in_info(run_id=5),
    # values in the manifest
    "a negative size": in_files("model.safetensors", -1),
    "a size that is a boolean": in_files("model.safetensors", True),
    "a size that is a text": in_files("model.safetensors", "9"),
    "a size above 64 bits": in_files("model.safetensors", 1 << 80),
    "a hash that is a list": in_files("model.safetensors", 1, []),
    "no state.json": lambda path: change_manifest(path, lambda m: m["files"].pop("state.json")),
    "no files": in_manifest(files={}),
    "a version that is a boolean": in_manifest(version=True),
    "a version that is a text": in_manifest(version="1"),
    "a negative number": in_manifest(number=-1),
    "a number that is a boolean": in_manifest(number=True),
    "a number above float range": in_manifest(number=10**400),
    "a time that is a list": in_manifest(created=[]),
    "info that is a list": in_manifest(info=[]),
    "a negative step": in_info(step=-1),
    "a step that is a text": in_info(step="5"),
    "a step that is a boolean": in_info(step=True),
    "an epoch above 64 bits": in_info(epoch=1 << 64),
    "tokens that are a list": in_info(tokens_seen=[1]),
    "weights_only that is a number": in_info(weights_only=2),
    "metrics that are a list": in_info(metrics=[1]),
    "a metric above float range": in_info(metrics={"val/loss": 10**400}),
    "a metric that is no float": in_info(metrics={"val/loss": {"$": "float", "v": "x"}}),
    "a manifest that is nested deep": raw("manifest.json", b"[" * 200_000),
    "a manifest with invalid UTF-8": raw("manifest.json", b'{"format": "\xff\xfe"}'),
    "a manifest that is a list": raw("manifest.json", b"[]"),
    "an empty manifest": raw("manifest.json", b""),
    # what is no regular file
    "a manifest that is a link": linked("manifest.json"),
    "weights that are a link": linked("model.safetensors"),
    "a state that is a link": linked("state.json"),
    "tensors that are a link": linked("state.safetensors"),
    "a checkpoint that is a link": link_folder,
    "a manifest that is a FIFO": replaced("manifest.json", lambda p: os.mkfifo(p)),
    "a state that is a FIFO": replaced("state.json", lambda p: os.mkfifo(p)),
    "weights that are a folder": replaced("model.safetensors", Path.mkdir),
    # headers of tensors
    "a header larger than its file": raw("model.safetensors", (1 << 63).to_bytes(8, "little")),
    "a file of seven bytes": raw("model.safetensors", b"\x01" * 7),
    "a header that is no JSON": raw("model.safetensors", (64).to_bytes(8, "little") + BYTES),
    "a header that is a list": lambda path: change_header(path, lambda _: []),
    "a header that is nested deep": raw(
        "model.safetensors", (200_000).to_bytes(8, "little") + b"[" * 200_000
    ),
    "a tensor of terabytes": in_tensor(shape=[1 << 20, 1 << 20], data_offsets=[0, 1 << 42]),
    "tensors that overlap": in_tensor(shape=[2], data_offsets=[0, 8]),
    "a gap between tensors": in_tensor(shape=[5], data_offsets=[4, 24]),
    "a shape of negative numbers": in_tensor(shape=[-2, -3]),
    "a shape of booleans": in_tensor(shape=[True]),
    "a shape that overflows": in_tensor(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0]),
    "an unknown dtype": in_tensor(dtype="F99"),
    "a dtype that is a list": in_tensor(dtype=[]),
    "offsets that are texts": in_tensor(data_offsets=["0", "24"]),
    "metadata that is a list": lambda path: change_header(
        path, lambda header: header.update(__metadata__=[1])
    ),
    "a tie to a missing tensor": in_metadata(same={"x": "missing"}),
    "ties in a cycle": in_metadata(same={"x": "y", "y": "x"}),
    "a tie in place of a tensor": in_metadata(same={"w": "b"}),
    "ties that are a list": in_metadata(same=["w"]),
    "a tie to a list": in_metadata(same={"x": ["w"]}),
    "a viewed dtype that is a function": in_metadata(viewed={"b": ["load", [2]]}),
    "a viewed dtype that is quantized": in_metadata(viewed={"b": ["qint8", [16]]}),
    "a viewed shape of terabytes": in_metadata(viewed={"b": ["complex64", [1 << 40]]}),
    "a viewed dtype without a shape": in_metadata(viewed={"b": ["complex64"]}),
    # values in state.json
    "a state that is a list": in_tree(state=[]),
    "a state with a key that is a number": in_tree(state={"$": "dict", "v": [[1, 2]]}),
    "no model": lambda path: change_state(path, lambda tree: tree.pop("model") and None),
    "a model that is a text": in_tree(model="x"),
    "versions that are a text": in_tree(metadata="x"),
    "a tree that is a list": lambda path: change_state(path, lambda _: [1]),
    "a tensor that is missing": in_state({"$": "tensor", "v": "t99"}),
    "a tensor whose name is a list": in_state({"$": "tensor", "v": ["t0"]}),
    "a type that is a list": in_state({"$": [], "v": 1}),
    "an unknown type": in_state({"$": "object", "v": 1}),
    "a type without a value": in_state({"$": "tuple"}),
    "a tuple of a text": in_state({"$": "tuple", "v": "abc"}),
    "a set of lists": in_state({"$": "set", "v": [[1]]}),
    "keys that are lists": in_state({"$": "dict", "v": [[[1], 2]]}),
    "pairs of three": in_state({"$": "dict", "v": [[1, 2, 3]]}),
    "a dtype that is a function": in_state({"$": "dtype", "v": "load"}),
    "a device that does not exist": in_state({"$": "device", "v": "nowhere:0"}),
    "a size of texts": in_state({"$": "Size", "v": ["a"]}),
    "an integer that is none": in_state({"$": "int", "v": "0xzz"}),
    "a float that is none": in_state({"$": "float", "v": 3}),
    "bytes that are none": in_state({"$": "bytes", "v": "a"}),
    "an array of objects": in_state({"$": "numpy", "dtype": "|O", "v": "AAAAAAAAAAA="}),
    "an array with fields": in_state({"$": "numpy", "dtype": "i4,i4", "v": "AAAAAAAAAAA="}),
    "an array of another size": in_state(
        {"$": "ndarray", "dtype": "<i8", "shape": [1 << 50], "v": "t0"}
    ),
    "an array a thousand times": in_state(
        [{"$": "ndarray", "dtype": "<i8", "shape": [3], "v": "t0"}] * 1000
    ),
    "a state that is nested deep": in_state(nested(400)),
    "a state that cannot be parsed": raw("state.json", b'{"state": ' + b"[" * 200_000),
    "a state with invalid UTF-8": raw("state.json", b'{"state": {"a": "\xff"}, "model": {}}'),
}


@needs_links
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_and_others_are_found(root: Path, name: str) -> None:
    path, run = hostile(root), root / "run"
    HOSTILE[name](path)
    before = snapshot(root)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2500
    texts = read_everything(run, path)
    assert SECRET not in " ".join([*texts, str(caught.value)])
    assert snapshot(root) == before
    scan = scan_checkpoints(path.parent)
    assert run / "checkpoints" / "step_1" in scan.complete
    assert path in scan.complete or path.name in scan.damage or not path.is_dir()


@pytest.mark.parametrize(
    ("limit", "file"),
    [
        ("manifest_bytes", "manifest.json"),
        ("state_bytes", "model.safetensors"),
        ("state_bytes", "state.json"),
    ],
)
def test_files_above_a_limit_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: str, file: str
) -> None:
    path = hostile(root)
    if file == "state.json":
        change_state(path, lambda tree: tree["state"].update(text="x" * 5000))
    monkeypatch.setattr(file_limits, limit, 1000 if file == "state.json" else 100)
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read.*file_limits"):
        load_checkpoint(path)


def test_terabytes_that_are_not_on_the_disk_are_not_read(root: Path) -> None:
    path, size = hostile(root), 1 << 42
    change_manifest(path, lambda m: m["files"]["model.safetensors"].update(size=size))
    os.truncate(path / "model.safetensors", size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is sparse.*hole_bytes"):
        load_checkpoint(path)
    assert "is sparse" in scan_checkpoints(path.parent).damage["step_2"]
    assert find_checkpoint(root / "run", verify=True).name == "step_1"


def test_holes_within_the_limit_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(
        root / "zeros", model={"w": torch.zeros(1 << 18)}, state={}, info={"step": 1}
    )
    file = path / "model.safetensors"
    data = file.read_bytes()
    with file.open("wb") as stream:
        stream.write(data[:4096])
        stream.truncate(len(data))
    assert load_checkpoint(path).model["w"].sum() == 0
    monkeypatch.setattr(file_limits, "hole_bytes", 1 << 16)
    with pytest.raises(CheckpointError, match="is sparse"):
        load_checkpoint(path)


def test_one_file_under_many_names_is_not_read_for_each(root: Path) -> None:
    path = hostile(root)
    for number in range(200):
        (path / f"x{number}").hardlink_to(path / "model.safetensors")

    def name_all(manifest: dict[str, Any]) -> None:
        facts = manifest["files"]["model.safetensors"]
        manifest["files"] |= {f"x{number}": facts for number in range(200)}

    change_manifest(path, name_all)
    with pytest.raises(CheckpointError, match="names 203 files; expected at most 100"):
        load_checkpoint(path)


def test_the_deepest_state_that_is_saved_is_loaded(tmp_path: Path) -> None:
    state: Any = 1
    for _ in range(95):
        state = {0: state}  # three levels of JSON
    path = save_checkpoint(tmp_path / "deep", model={}, state={"deep": state}, info={})
    assert load_checkpoint(path).state == {"deep": state}


@needs_links
def test_the_commands_name_the_bad_checkpoint_and_list_the_good_one(root: Path) -> None:
    run, path = root / "run", hostile(root)
    in_files("../../../secret.txt")(path)
    save(run / "checkpoints" / "step_3", 3)
    linked("state.json")(run / "checkpoints" / "step_3")
    before = snapshot(root)
    exported = str(root / "exported.safetensors")
    for arguments in (
        ["list"],
        ["verify"],
        ["export", "-c", "step_1", "-o", exported],
    ):
        done = run_hookline("checkpoints", arguments[0], run / "checkpoints", *arguments[1:])
        assert "Traceback" not in done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert "step_1" in done.stdout
        if arguments[0] in ("list", "verify"):
            assert "plain file name" in done.stdout + done.stderr
            assert "symbolic link" in done.stdout + done.stderr
    after = snapshot(root)
    assert after.keys() - before.keys() == {"exported.safetensors"}
    assert before.items() <= after.items()


@needs_links
def test_a_folder_of_checkpoints_that_is_a_link_is_not_followed(root: Path) -> None:
    run = root / "run"
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(root / "outside")
    with pytest.raises(CheckpointError, match="symbolic link"):
        find_checkpoint(run)
    assert get_last_checkpoint(run) is None
    assert not scan_checkpoints(run / "checkpoints").complete


@pytest.mark.parametrize("text", ["../../outside/step_9", "/etc", "", ".", "..", "a/b", "x" * 5000])
def test_a_pointer_names_a_checkpoint_in_its_folder_only(root: Path, text: str) -> None:
    folder = root / "run" / "checkpoints"
    (folder / "last").write_text(text)
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        find_checkpoint(folder / "last")
    assert find_checkpoint(folder) == folder / "step_2"


# -- what writes and removes ----------------------------------------------------------------------


ENTRY = {"name": "step_2", "step": 2, "number": 1, "score": 0.5}


@pytest.mark.parametrize(
    "state",
    [
        {"kept": [{**ENTRY, "name": "../../outside/step_9"}], "latest": [], "number": 1},
        {"kept": [], "latest": [{**ENTRY, "name": "../../victim"}], "number": 1},
        {"kept": [], "latest": [{**ENTRY, "name": "/tmp/victim"}], "number": 1},
        {"kept": [], "latest": [{**ENTRY, "name": ".hidden"}], "number": 1},
        {"kept": [{**ENTRY, "step": "2"}], "latest": [], "number": 1},
        {"kept": [{**ENTRY, "number": True}], "latest": [], "number": 1},
        {"kept": [{**ENTRY, "score": "best"}], "latest": [], "number": 1},
        {"kept": [{**ENTRY, "created": "x"}], "latest": [], "number": 1},
        {"kept": "step_2", "latest": [], "number": 1},
        {"kept": [], "latest": [], "number": -1},
        {"kept": [], "latest": []},
        "step_2",
    ],
)
def test_retention_refuses_names_outside_its_folder(root: Path, state: Any) -> None:
    retention = Retention(keep_last=1)
    before = snapshot(root)
    with pytest.raises(CheckpointError, match="list of checkpoints is damaged"):
        retention.load_state_dict(state)
    retention.open(root / "run" / "checkpoints", resumed=True)
    retention.reconcile(hostile(root), writer="checkpoint", run_id="run")
    assert snapshot(root) == before


@needs_links
def test_removing_never_leaves_the_folder_or_takes_what_is_not_ours(root: Path) -> None:
    path = hostile(root)
    link_folder(path)
    assert not remove_checkpoint(path)
    path.unlink()
    save(path)
    (path / "state.json").unlink()
    (path / "state.json").mkdir()
    (path / "state.json" / "precious").write_text("x")
    before = snapshot(root)
    assert not remove_checkpoint(path)
    assert not remove_checkpoint(root)
    assert snapshot(root) == before


@pytest.mark.parametrize("under", ["../../victim", "/tmp/victim-of-upload", "a/b", "..", ".x"])
def test_an_upload_stays_in_its_destination(root: Path, under: str) -> None:
    before = snapshot(root)
    with pytest.raises(CheckpointError, match="not a plain name"):
        Destination(str(root / "run" / "copies")).upload(
            Bundle.of(hostile(root)), under, lambda: False
        )
    assert snapshot(root) == before


@needs_links
def test_an_upload_does_not_copy_what_a_link_names(root: Path) -> None:
    path = hostile(root)
    bundle = Bundle.of(path)
    linked("state.json")(path)
    with pytest.raises(OSError, match="symbolic link"):
        Destination(str(root / "copies")).upload(bundle, "run", lambda: False)
    assert not list((root / "copies" / "run").rglob("*.json"))
