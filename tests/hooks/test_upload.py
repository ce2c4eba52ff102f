"""UploadHook: copies that are whole or not there, and training that never waits for them."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from loops import batches, make, make_trainer

import hookline
from hookline import CheckpointError, Trainer
from hookline.checkpoint import (
    complete_checkpoints,
    find_checkpoint,
    load_checkpoint,
)
from hookline.checkpoint.atomic_files import TEMPORARY
from hookline.hooks.checkpointing import upload
from hookline.hooks.checkpointing.checkpoint_hook import CheckpointHook
from hookline.hooks.checkpointing.upload import UploadHook


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch):
    monkeypatch.setattr(upload, "_PAUSE", 0.001)
    yield
    assert not [t for t in threading.enumerate() if t.name == "hookline-upload"]


@pytest.fixture
def memory():
    fs = MemoryFileSystem()
    fs.store.clear()
    yield fs
    fs.store.clear()


class Flaky(MemoryFileSystem):
    """A memory filesystem on which a call fails as often as it is told."""

    protocol = "flaky"
    cachable = False
    fails: dict[str, int] = {}  # noqa: RUF012 - set by each test
    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _count(self, call, path):
        self.calls.append(f"{call} {path.rpartition('/')[2]}")
        if self.fails.get(self.calls[-1], 0):
            self.fails[self.calls[-1]] -= 1
            raise ConnectionError("the network is down")

    def open(self, path, mode="rb", **kwargs):
        if mode == "wb":
            self._count("write", path)
        return super().open(path, mode, **kwargs)

    def mv(self, path1, path2, **kwargs):
        self._count("move", path1)
        super().mv(path1, path2, **kwargs)


@pytest.fixture
def flaky(memory):
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.fails, Flaky.calls = {}, []
    return Flaky


def trainer_of(tmp_path: Path, *hooks, **options) -> Trainer:
    return make_trainer(*hooks, **{"runs": tmp_path / "runs", "max_epochs": 3} | options)


def fit(tmp_path, *hooks, **fields) -> Trainer:
    return trainer_of(tmp_path, CheckpointHook(), *hooks, **fields).fit(batches(2))


def names(folder: Path) -> list[str]:
    return [p.name for p in complete_checkpoints(folder)]


EPOCHS = ["epoch_0000", "epoch_0001", "epoch_0002"]


# -- a folder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_every_checkpoint_is_in_the_folder_when_training_ends(tmp_path, kind):
    hook = UploadHook(kind(tmp_path / "far" / "away"))
    trainer = fit(tmp_path, hook)
    there = tmp_path / "far" / "away" / trainer.run.id
    assert names(there) == EPOCHS
    assert sorted(p.name for p in there.iterdir()) == EPOCHS, "nothing else"
    copy, own = load_checkpoint(find_checkpoint(there)), trainer.model.state_dict()
    assert all(torch.equal(copy.model[name], own[name]) for name in own)
    assert names(trainer.run.checkpoints) == EPOCHS
    assert list(hook.uploaded.values()) == [str(there / name) for name in EPOCHS]
    assert hook.failed == hook.skipped == []
    assert trainer.hooks.list_hooks() == ["checkpoint", "upload", "identity"]


def test_another_checkpoint_of_the_same_name_is_not_overwritten(tmp_path):
    hook = UploadHook(tmp_path / "copies")
    first = fit(tmp_path, hook, max_epochs=1)
    there = tmp_path / "copies" / first.run.id
    before = load_checkpoint(there / "epoch_0000").info
    other = fit(tmp_path / "other", max_epochs=1)
    hook.on_train_start()
    hook.on_checkpoint_save(first, find_checkpoint(other.run.path))
    hook.on_train_end()
    assert names(there) == ["epoch_0000", "epoch_0000_2"]
    assert load_checkpoint(there / "epoch_0000").info == before


def test_what_an_upload_that_was_killed_left_behind_is_cleaned_up(tmp_path):
    hook = UploadHook(tmp_path / "copies")
    trainer = trainer_of(tmp_path, CheckpointHook(), hook)

    class Leaves(hookline.Hook):
        def on_train_start(self, trainer):
            folder = tmp_path / "copies" / trainer.run.id / f"{TEMPORARY}epoch_0000"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "model.safetensors").write_text("half of it")

    trainer.add_hook(Leaves())
    trainer.fit(batches(2))
    assert sorted(p.name for p in (tmp_path / "copies" / trainer.run.id).iterdir()) == EPOCHS


# -- what fails -----------------------------------------------------------------------------------


def test_a_destination_that_fails_never_stops_training_and_is_counted(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    hook = UploadHook(tmp_path / "file" / "below", retries=2)
    trainer = fit(tmp_path, hook)
    assert trainer.status == "completed"
    assert [p.name for p in hook.failed] == EPOCHS
    assert hook.uploaded == {}
    records = [r for r in caplog.records if "could not be copied" in r.getMessage()]
    assert [r.levelname for r in records] == ["WARNING", "WARNING", "ERROR"] * 3
    assert "epoch_0000 could not be copied" in records[0].getMessage()
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_damaged_checkpoint_is_found_and_not_copied(tmp_path, caplog):
    class Damages(hookline.Hook):
        def on_checkpoint_save(self, path: Path):
            file = path / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    hook = UploadHook(tmp_path / "copies", retries=0)
    trainer = fit(tmp_path, Damages(), hook, max_epochs=1)
    assert len(hook.failed) == 1
    assert "differs from what was written to" in caplog.text
    assert list((tmp_path / "copies" / trainer.run.id).iterdir()) == []


def test_what_was_removed_before_its_turn_is_left_out(tmp_path, caplog):
    class Removes(hookline.Hook):
        def on_checkpoint_save(self, path: Path, epoch):
            if epoch == 0:
                shutil.rmtree(path)

    caplog.set_level("INFO", "hookline")
    hook = UploadHook(tmp_path / "copies")
    trainer = fit(tmp_path, Removes(), hook)
    assert names(tmp_path / "copies" / trainer.run.id) == EPOCHS[1:]
    assert [p.name for p in hook.skipped] == EPOCHS[:1]
    assert hook.failed == []
    assert "epoch_0000 was removed before it was copied" in caplog.text


def test_the_wait_at_the_end_has_a_limit_and_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(upload, "_PAUSE", 600)
    caplog.set_level("INFO", "hookline")
    (tmp_path / "file").write_text("in the way")
    hook = UploadHook(tmp_path / "file", timeout=0.05)
    trainer = fit(tmp_path, hook)
    assert trainer.status == "completed"
    assert sorted(p.name for p in hook.failed) == EPOCHS
    assert "Waiting for 3 checkpoints to be copied, for 0.05 seconds." in caplog.text
    assert "were not copied within 0.05 seconds" in caplog.text
    assert "epoch_0000 was not copied: the timeout was reached." in caplog.text


def test_only_so_many_wait_and_the_oldest_is_left_out(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(upload, "_PAUSE", 600)
    monkeypatch.setattr(upload, "_MAX_WAITING", 2)
    (tmp_path / "file").write_text("in the way")
    hook = UploadHook(tmp_path / "file", timeout=0.05)
    fit(tmp_path, hook, max_epochs=8)
    left_out = [p.name for p in hook.skipped]
    assert len(left_out) in (5, 6), "the first one may have had its turn already"
    assert left_out[-1] == "epoch_0005"
    assert len(hook.failed) == 8 - len(left_out)
    assert "Too many checkpoints are waiting" in caplog.text


# -- fsspec ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", ["write model.safetensors", "move state.json", "move manifest.json"]
)
def test_a_network_that_fails_is_tried_again_until_the_copy_is_whole(tmp_path, flaky, call):
    flaky.fails = {call: 2}
    hook = UploadHook("flaky://bucket", retries=2)
    trainer = fit(tmp_path, hook, max_epochs=1)
    assert hook.failed == []
    assert flaky.calls.count(call) == 3
    assert flaky.calls[-1] == "move manifest.json", "the last of all"
    found = flaky().find(f"/bucket/{trainer.run.id}")
    assert {str(Path(p).parent) for p in found} == {f"/bucket/{trainer.run.id}/epoch_0000"}
    flaky().get(f"/bucket/{trainer.run.id}/epoch_0000", str(tmp_path / "back"), recursive=True)
    load_checkpoint(tmp_path / "back")


def test_a_reader_gets_a_complete_checkpoint_or_none_at_any_time_of_an_upload(tmp_path, flaky):
    seen: list[str] = []

    class Reads(flaky):
        def _count(self, call, path):
            run = path.split("/.tmp-")[0].replace("flaky://", "/")
            store, copy = fsspec.filesystem("memory"), tmp_path / "fetched" / str(len(seen))
            if store.exists(run):
                store.get(run, str(copy), recursive=True)
            try:
                found = find_checkpoint(copy, verify=True)
            except CheckpointError:
                seen.append("")
            else:
                load_checkpoint(found)
                seen.append(found.name)

    fsspec.register_implementation("flaky", Reads, clobber=True)
    fit(tmp_path, UploadHook("flaky://bucket"), max_epochs=2)
    assert len(seen) == 16, "eight calls for each checkpoint"
    assert set(seen[:8]) == {""}, "until the manifest of the first is there"
    assert set(seen[8:]) == {"epoch_0000"}


# -- a bare loop ----------------------------------------------------------------------------------


def test_a_bare_loops_own_files_and_folders_are_copied_too(tmp_path):
    model, optimizer = make()
    hook = UploadHook(tmp_path / "copies")
    folder = tmp_path / "parts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.bin").write_bytes(b"a")
    (folder / "b.bin").write_bytes(b"b")
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        torch.save(model.state_dict(), tmp_path / "model.pt")
        session.notify_checkpoint_saved(tmp_path / "model.pt")
        session.notify_checkpoint_saved(folder)
    assert hook.failed == []
    copies = tmp_path / "copies"
    assert (copies / "model.pt").read_bytes() == (tmp_path / "model.pt").read_bytes()
    assert (copies / "parts" / "deep" / "a.bin").read_bytes() == b"a"
    assert sorted(p.name for p in copies.iterdir()) == ["model.pt", "parts"]
