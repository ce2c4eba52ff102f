"""Checkpoints fetched from a URL: complete and verified, or not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from loops import batches, make_trainer, same, weights

from hookline import CheckpointError, ConfigError
from hookline.checkpoint import load_checkpoint, save_checkpoint
from hookline.checkpoint.catalog import hash_manifest
from hookline.checkpoint.remote import fetch_checkpoint
from hookline.hooks.checkpointing.checkpoint_hook import CheckpointHook
from hookline.hooks.checkpointing.upload import UploadHook


@pytest.fixture
def memory():
    fs = MemoryFileSystem()
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def put(fs, tmp_path: Path, name: str, value: float, *, number: int = 0, **info) -> str:
    """Put a checkpoint into a bucket's folder of checkpoints; return its path there."""
    local = save_checkpoint(
        tmp_path / "local" / name,
        model={"w": torch.full((3,), value)},
        state={"v": value},
        info={"step": int(value), **info},
    )
    if number:
        rewrite(local / "manifest.json", number=number)
    if fs.exists(f"/bucket/run/checkpoints/{name}"):
        fs.rm(f"/bucket/run/checkpoints/{name}", recursive=True)
    fs.put(str(local), f"/bucket/run/checkpoints/{name}", recursive=True)
    return f"/bucket/run/checkpoints/{name}"


def rewrite(path: Path, **fields) -> None:
    """Change fields of a manifest, with the hash that it then needs."""
    manifest = json.loads(path.read_text()) | fields
    del manifest["check"]
    path.write_text(json.dumps(manifest | {"check": hash_manifest(manifest)}))


def value_of(path: Path) -> float:
    return load_checkpoint(path).model["w"][0].item()


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    "url",
    [
        "memory://bucket/run/checkpoints/a",
        "memory://bucket/run/checkpoints/a/",
        "memory://bucket/run/checkpoints",
        "memory://bucket/run",
        "memory://bucket/run/",
    ],
)
def test_a_checkpoint_a_folder_of_checkpoints_and_a_run_are_fetched(tmp_path, memory, url):
    put(memory, tmp_path, "a", 1.0)
    memory.pipe_file("/bucket/run/manifest.json", b'{"format": "hookline.run"}')
    memory.pipe_file("/bucket/run/checkpoints/last", b"a\n")
    path = fetch_checkpoint(url, tmp_path / "into")
    assert path == tmp_path / "into" / "a"
    assert value_of(path) == 1.0
    assert entries(tmp_path / "into") == ["a"]


def test_a_url_of_the_local_file_system(tmp_path):
    local = save_checkpoint(tmp_path / "c" / "a", model={"w": torch.ones(1)}, state={}, info={})
    path = fetch_checkpoint(local.parent.as_uri(), tmp_path / "into")
    assert value_of(path) == 1.0


def test_the_newest_is_the_one_with_the_highest_number_whatever_the_clock_said(tmp_path, memory):
    put(memory, tmp_path, "b", 2.0, number=12)
    put(memory, tmp_path, "a", 1.0, number=3)
    assert fetch_checkpoint("memory://bucket/run", tmp_path / "into").name == "b"


@pytest.mark.parametrize("kind", ["emergency", "weights_only"])
def test_a_checkpoint_that_no_run_resumes_from_is_fetched_only_by_its_own_url(
    tmp_path, memory, kind
):
    put(memory, tmp_path, "a", 1.0, number=1)
    put(memory, tmp_path, "b", 2.0, number=2, **{kind: True})
    assert fetch_checkpoint("memory://bucket/run", tmp_path / "into").name == "a"
    url = "memory://bucket/run/checkpoints/b"
    assert value_of(fetch_checkpoint(url, tmp_path / "into")) == 2.0


def test_an_upload_without_its_manifest_and_an_unfinished_one_are_not_checkpoints(tmp_path, memory):
    put(memory, tmp_path, "a", 1.0, number=1)
    memory.rm_file(put(memory, tmp_path, "b", 2.0, number=2) + "/manifest.json")
    put(memory, tmp_path, ".tmp-c", 3.0, number=3)
    assert fetch_checkpoint("memory://bucket/run", tmp_path / "into").name == "a"
    with pytest.raises(CheckpointError, match="No complete checkpoint at memory://bucket/run/chec"):
        fetch_checkpoint("memory://bucket/run/checkpoints/b", tmp_path / "into")


def damage(memory, path: str, how: str) -> None:
    data = memory.cat_file(path)
    if how == "changed":
        memory.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "truncated":
        memory.pipe_file(path, data[:-1])
    else:
        memory.rm_file(path)


@pytest.mark.parametrize("how", ["changed", "truncated", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_file_is_named_and_the_next_older_one_is_fetched(
    tmp_path, memory, caplog, how, name
):
    put(memory, tmp_path, "a", 1.0, number=1)
    path = put(memory, tmp_path, "b", 2.0, number=2)
    damage(memory, f"{path}/{name}", how)
    with pytest.raises(CheckpointError, match=name if how != "missing" else "b"):
        fetch_checkpoint("memory://bucket/run/checkpoints/b", tmp_path / "into")
    assert entries(tmp_path / "into") == []
    assert fetch_checkpoint("memory://bucket/run", tmp_path / "into").name == "a"
    assert entries(tmp_path / "into") == ["a"]
    if (how, name) != ("missing", "manifest.json"):
        assert f"checkpoints/b/{name}" in caplog.text


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "..", "c:evil", "a\\b", ""])
def test_a_manifest_that_names_files_outside_of_its_folder_is_refused(tmp_path, memory, name):
    path = put(memory, tmp_path, "a", 1.0)
    local = tmp_path / "local" / "a" / "manifest.json"
    files = json.loads(local.read_text())["files"]
    rewrite(local, files={**files, name: files["state.json"]})
    memory.put_file(str(local), f"{path}/manifest.json")
    with pytest.raises(CheckpointError, match="not a plain file name"):
        fetch_checkpoint(f"memory:/{path}", tmp_path / "into" / "deep")
    assert entries(tmp_path / "into" / "deep") == []
    assert entries(tmp_path / "into") == ["deep"]


def test_a_checkpoint_that_is_there_is_not_fetched_again_and_nothing_is_overwritten(
    tmp_path, memory
):
    path, into = put(memory, tmp_path, "a", 1.0), tmp_path / "into"
    first = fetch_checkpoint("memory://bucket/run", into)
    memory.rm_file(f"{path}/model.safetensors")
    assert fetch_checkpoint("memory://bucket/run", into) == first, "only the manifest was read"
    put(memory, tmp_path / "other", "a", 5.0)
    again = fetch_checkpoint("memory://bucket/run", into)
    assert (first.name, value_of(first), again.name, value_of(again)) == ("a", 1.0, "a_2", 5.0)
    (first / "model.safetensors").write_bytes(b"damaged")
    third = fetch_checkpoint("memory://bucket/run", into)
    assert third == again


def test_where_nothing_is_the_error_says_so(tmp_path, memory):
    with pytest.raises(CheckpointError, match="/bucket/nothing does not exist"):
        fetch_checkpoint("memory://bucket/nothing", tmp_path)
    memory.pipe_file("/bucket/empty/notes.txt", b"")
    with pytest.raises(CheckpointError, match="No complete checkpoint at memory://bucket/empty"):
        fetch_checkpoint("memory://bucket/empty", tmp_path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"fetched from s3://bucket/run: .*s3fs"):
        fetch_checkpoint("s3://bucket/run", tmp_path)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match="pip install fsspec"):
        fetch_checkpoint("memory://bucket/run", tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="unknown protocol 'nothing'"):
        fetch_checkpoint("nothing://bucket/run", tmp_path)


def test_training_goes_on_from_what_was_uploaded(tmp_path, memory):
    def fit(folder: str, *hooks, **options):
        runs = tmp_path / folder
        trainer = make_trainer(*hooks, runs=runs, max_epochs=options.pop("max_epochs", 4))
        return trainer.fit(batches(3), **options)

    whole = fit("whole", CheckpointHook())
    first = fit("first", CheckpointHook(), UploadHook("memory://bucket/runs"), max_epochs=2)
    path = fetch_checkpoint(f"memory://bucket/runs/{first.run.id}", tmp_path / "fetched")
    assert path.name == "epoch_0001"
    again = fit("again", CheckpointHook(), resume_from=path)
    assert same(weights(again.model), weights(whole.model))


def test_errors_that_only_a_filesystem_knows_are_reported_with_the_url(
    tmp_path, memory, monkeypatch
):
    class NoCredentialsError(Exception):  # as in botocore: neither an OSError nor a ValueError
        pass

    def fail(*_, **__):
        raise NoCredentialsError("Unable to locate credentials")

    put(memory, tmp_path, "a", 1.0)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(CheckpointError, match=r"memory://bucket/run could not be .* credentials"):
        fetch_checkpoint("memory://bucket/run", tmp_path / "into")
