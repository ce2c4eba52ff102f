"""The checkpoint saver: copies at once, writes in the background, never loses what was there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline.checkpoint import (
    CheckpointSaver,
    SaveResult,
    load_checkpoint,
)


class Gate:
    """Holds the writer back at a system call until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "write") -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._call: Callable[..., Any] = getattr(os, name)
        monkeypatch.setattr(os, name, self._wait)

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "hookline-checkpoint":
            self.reached.set()
            assert self._open.wait(20)
        return self._call(*args, **kwargs)

    def open(self) -> None:
        self._open.set()


def saved(saver: CheckpointSaver, folder: Path, value: float = 1.0, **info: Any) -> None:
    saver.save([folder], model={"w": torch.full((10,), value)}, state={"v": value}, info=info)


def only(saver: CheckpointSaver) -> SaveResult:
    saver.wait()
    (result,) = saver.finished()
    return result


# -- what reaches the file ------------------------------------------------------------------------


def test_the_file_holds_the_values_at_the_time_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()

    step()
    hook = {"average": torch.ones(5), "counts": [1, 2], "nested": {"patience": 3}}
    state = {"optimizer": optimizer.state_dict(), "hook": hook, "random": torch.get_rng_state()}
    before = json.dumps([_plain(dict(model.state_dict())), _plain(state)])
    gate = Gate(monkeypatch)
    saver = CheckpointSaver()
    saver.save([tmp_path / "a"], model=model.state_dict(), state=state, info={"step": 1})
    assert gate.reached.wait(20)
    for _ in range(3):
        step()  # changes parameters, BatchNorm's statistics and the optimizer's state in place
    hook["average"].add_(1)  # type: ignore[attr-defined]
    hook["counts"].append(9)  # type: ignore[attr-defined]
    hook["nested"]["patience"] = 0  # type: ignore[index]
    state["random"].zero_()
    assert saver.finished() == []
    gate.open()
    result = only(saver)
    assert result.path == tmp_path / "a"
    assert result.error is None
    assert result.info == {"step": 1}
    loaded = load_checkpoint(result.path)
    assert json.dumps([_plain(loaded.model), _plain(loaded.state)]) == before


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return [[str(k), _plain(v)] for k, v in sorted(value.items(), key=str)]
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def test_the_memory_is_reused_while_shapes_and_ties_change(tmp_path: Path) -> None:
    saver = CheckpointSaver(background=False)
    weight = torch.randn(3, 4)
    models: list[dict[str, torch.Tensor]] = [
        {"a": weight, "b": torch.randn(2).to(torch.complex128), "c": torch.tensor(True)},
        {
            "a": torch.randn(3, 4),
            "b": torch.randn(2).to(torch.complex128),
            "c": torch.tensor(False),
        },
        {"a": weight, "tied": weight, "half": torch.randn(5).half()},
        {"a": weight, "tied": weight.clone(), "half": torch.randn(5).half()},
        {"a": torch.randn(600, 600).t()},  # larger than the memory
        {},
        {"a": torch.randn(4, 3).t()},
    ]
    for i, model in enumerate(models):
        saver.save([tmp_path / f"{i}"], model=model, state={}, info={})
        path = only(saver).path
        assert path is not None
        loaded = load_checkpoint(path).model
        assert loaded.keys() == model.keys()
        assert all(torch.equal(loaded[name], model[name]) for name in model)
    tied = load_checkpoint(tmp_path / "2").model
    assert tied["a"] is tied["tied"]


def test_too_little_memory_is_a_result_and_the_next_save_works(tmp_path: Path) -> None:
    saver = CheckpointSaver()
    huge = torch.ones(1).expand(10**14)  # 400 TB
    saver.save([tmp_path / "a"], model={"w": huge}, state={}, info={"step": 1})
    result = only(saver)
    assert result.path is None
    assert "could not be copied" in str(result.error)
    saved(saver, tmp_path / "b", 2)
    assert only(saver).path == tmp_path / "b"
    assert load_checkpoint(tmp_path / "b").state == {"v": 2}


# -- one save at a time ---------------------------------------------------------------------------


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "fsync")
    saver = CheckpointSaver()
    saved(saver, tmp_path / "a", 1)
    assert gate.reached.wait(20)
    threading.Timer(0.2, gate.open).start()
    saved(saver, tmp_path / "b", 2)
    assert [r.path for r in saver.finished()] == [tmp_path / "a"]
    assert only(saver).path == tmp_path / "b"
    assert load_checkpoint(tmp_path / "a").state == {"v": 1}
    assert (tmp_path / "last").read_text() == "b\n"


@pytest.mark.parametrize("has_started", [True, False])
def test_a_signal_while_the_thread_starts_loses_no_save_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_started: bool
) -> None:
    start = threading.Thread.start

    def start_and_raise(thread: threading.Thread) -> None:
        if has_started:
            start(thread)
        raise KeyboardInterrupt

    saver = CheckpointSaver()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_raise)
        with pytest.raises(KeyboardInterrupt):
            saver.save(
                [tmp_path / "step_1"], model={"w": torch.ones(2)}, state={}, info={"step": 1}
            )
    saver.wait()
    results = [result.path for result in saver.finished()]
    assert results == [tmp_path / "step_1"][: int(has_started)]
    saver.save([tmp_path / "step_2"], model={"w": torch.ones(2)}, state={}, info={"step": 2})
    saver.close()
    names = sorted(folder.name for folder in tmp_path.glob("step_*"))
    assert names == ["step_1", "step_2"][not has_started :]


@pytest.mark.parametrize("kind", ["emergency", "weights_only"])
def test_a_checkpoint_that_no_run_resumes_from_does_not_move_last(
    tmp_path: Path, kind: str
) -> None:
    saver = CheckpointSaver()
    saved(saver, tmp_path / "a")
    saved(saver, tmp_path / "b", **{kind: True})
    saver.close()
    assert (tmp_path / "last").read_text() == "a\n"
    assert [r.info for r in saver.finished()] == [{}, {kind: True}]


# -- several folders ------------------------------------------------------------------------------


def test_several_folders_share_the_bytes_on_disk(tmp_path: Path) -> None:
    saver = CheckpointSaver()
    saved(saver, tmp_path / "x" / "old")
    folders = [tmp_path / "x" / "step_1", tmp_path / "x" / "best_1", tmp_path / "y" / "step_1"]
    saver.save(folders, model={"w": torch.ones(3)}, state={}, info={"step": 1})
    saver.wait()
    assert [r.path for r in saver.finished()][1:] == folders
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        assert len({(folder / name).stat().st_ino for folder in folders}) == 1
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    assert [manifest["number"] for manifest in manifests] == [2, 3, 1]
    for folder in folders:
        assert torch.equal(load_checkpoint(folder).model["w"], torch.ones(3))
    assert (tmp_path / "x" / "last").read_text() == "best_1\n"
    assert (tmp_path / "y" / "last").read_text() == "step_1\n"


def test_without_hard_links_the_bytes_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any, **__: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", unsupported)
    saver = CheckpointSaver()
    saver.save([tmp_path / "a", tmp_path / "b"], model={"w": torch.ones(3)}, state={}, info={})
    saver.wait()
    assert [r.error for r in saver.finished()] == [None, None]
    assert (tmp_path / "a" / "model.safetensors").stat().st_nlink == 1
    assert torch.equal(load_checkpoint(tmp_path / "b").model["w"], torch.ones(3))


def test_a_folder_that_fails_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = CheckpointSaver()
    folders = [tmp_path / "file" / "a", tmp_path / "x" / "a"]
    saver.save(folders, model={"w": torch.ones(3)}, state={}, info={})
    saver.wait()
    first, second = saver.finished()
    assert first.path is None
    assert first.error is not None
    assert "could not be written" in str(first.error)
    assert second.path == folders[1]
    load_checkpoint(folders[1])
