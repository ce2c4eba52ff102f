"""Damaged checkpoints: never loaded, always named, and older ones are found instead."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hookline
from hookline.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    set_pointer,
)
from hookline.checkpoint.catalog import hash_manifest, scan_checkpoints
from hookline.runs import Run

FILES = ("manifest.json", "model.safetensors", "state.safetensors", "state.json")
STATE = {"hooks": {"ema": {"averages": {"w": torch.arange(6.0)}}}, "rate": 1e-5, "text": "é"}


def save(folder: Path, **info: Any) -> Path:
    model = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)}
    return save_checkpoint(folder, model=model, state=STATE, info={"step": 1, "epoch": 0, **info})


def edit_manifest(path: Path, **fields: Any) -> None:
    """Change fields of a manifest, remove those that are None, and make its hash right."""
    manifest = {**json.loads((path / "manifest.json").read_text()), **fields}
    manifest = {name: value for name, value in manifest.items() if value is not None}
    manifest.pop("check")
    manifest["check"] = hash_manifest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two checkpoints of one folder, the newer one second."""
    folder = tmp_path_factory.mktemp("pair")
    first, second = save(folder / "step_000001"), save(folder / "step_000002")
    set_pointer(folder, "last", second)
    return first, second


# -- random damage --------------------------------------------------------------------------------


def truncate(data: bytes, place: float) -> bytes:
    return data[: int(place * len(data))]


def flip(data: bytes, place: float) -> bytes:
    changed = bytearray(data)
    bit = int(place * len(data) * 8)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


PLACES = st.floats(0, 1, exclude_max=True)
DAMAGES = st.lists(
    st.tuples(st.sampled_from(FILES), st.sampled_from([truncate, flip]), PLACES),
    min_size=1,
    max_size=3,
    unique_by=lambda damage: damage[0],
)


def reads_as_before(path: Path, manifest: bytes) -> bool:
    """Whether only the spelling of the manifest has changed, such as 1e-05 to 1E-05."""
    try:
        return bool(json.loads((path / "manifest.json").read_bytes()) == json.loads(manifest))
    except ValueError:
        return False


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damages=DAMAGES)
def test_random_damage_is_always_detected_and_the_older_checkpoint_is_found(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture, damages: list[Any]
) -> None:
    first, second = pair
    whole = {name: (second / name).read_bytes() for name in FILES}
    try:
        for name, damage, place in damages:
            (second / name).write_bytes(damage(whole[name], place))
        names = {name for name, *_ in damages}
        if names == {"manifest.json"} and reads_as_before(second, whole["manifest.json"]):
            assert find_checkpoint(first.parent, verify=True) == second
            return
        with pytest.raises(CheckpointError) as refused:
            load_checkpoint(second)
        assert any(f"{second}/{name} " in str(refused.value) for name in names)
        assert "'step_000001'" in str(refused.value)
        with pytest.raises(CheckpointError, match="step_000002"):
            find_checkpoint(second, verify=True)
        caplog.clear()
        assert find_checkpoint(first.parent, verify=True) == first
        assert hookline.get_last_checkpoint(first.parent) == first
        for record in caplog.records:
            assert any(f"{second}/{name} " in record.getMessage() for name in names)
            assert f"Using {first}" in record.getMessage()
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    finally:
        for name, data in whole.items():
            (second / name).write_bytes(data)


def test_a_changed_byte_is_found_only_by_verifying(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[0].parent, tmp_path / "copy")
    flip_bit(folder / "step_000002" / "state.json")
    assert find_checkpoint(folder) == folder / "step_000002"
    assert find_checkpoint(folder, verify=True) == folder / "step_000001"
    for named in (folder / "step_000002", folder / "last"):  # refused, and not replaced
        with pytest.raises(CheckpointError, match=r"step_000002.state\.json has changed"):
            find_checkpoint(named, verify=True)


# -- which one is the newest ----------------------------------------------------------------------


def test_the_number_decides_which_is_the_newest_whatever_the_clock_says(tmp_path: Path) -> None:
    paths = [save(tmp_path / name) for name in ("c", "a", "b")]
    for number, path in enumerate(paths, 1):
        edit_manifest(path, number=number, created=f"20{30 - number}-01-01T00:00:00.000000+00:00")
    assert list(scan_checkpoints(tmp_path).complete) == paths
    assert find_checkpoint(tmp_path) == tmp_path / "b"
    (tmp_path / "last").write_text("c\n")  # the process died before it moved the pointer
    assert find_checkpoint(tmp_path) == tmp_path / "b"
    assert find_checkpoint(tmp_path / "last") == tmp_path / "c"


def test_an_emergency_checkpoint_is_found_only_by_name(tmp_path: Path) -> None:
    first = save(tmp_path / "run" / "checkpoints" / "a")
    crashed = save(first.parent / "b", emergency=True)
    assert find_checkpoint(tmp_path / "run") == first
    assert hookline.get_last_checkpoint(tmp_path / "run") == first
    assert find_checkpoint(crashed) == crashed
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match=r"give its folder: b \(saved after a crash\)"):
        find_checkpoint(tmp_path / "run")
    assert hookline.get_last_checkpoint(tmp_path / "run") is None


def test_folders_that_are_not_checkpoints_are_not_called_damaged(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(pair[0].parent, tmp_path / "copy")
    (folder / "plots").mkdir()
    (folder / "exported").mkdir()
    (folder / "exported" / "model.safetensors").write_bytes(b"")
    (folder / "model.safetensors").write_bytes(b"")
    assert find_checkpoint(folder, verify=True) == folder / "step_000002"
    assert not caplog.records


# -- get_last_checkpoint --------------------------------------------------------------------------


def test_the_last_checkpoint_of_a_run_of_a_folder_and_of_several_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [Run.create(tmp_path / "runs", config={}, seed=0, hooks=[]) for _ in range(3)]
    by_age = sorted(run.path for run in runs)
    assert hookline.get_last_checkpoint(tmp_path / "runs") is None
    old = save(by_age[0] / "checkpoints" / "step_000009")
    save(by_age[1] / "checkpoints" / "step_000001")
    newest = save(by_age[1] / "checkpoints" / "step_000002")
    assert hookline.get_last_checkpoint(by_age[0]) == old
    assert hookline.get_last_checkpoint(str(by_age[1] / "checkpoints")) == newest
    assert hookline.get_last_checkpoint(tmp_path / "runs") == newest  # the third run has none
    assert hookline.get_last_checkpoint(by_age[2]) is None
    assert hookline.get_last_checkpoint(tmp_path / "nowhere") is None
    assert not caplog.records
    flip_bit(newest / "model.safetensors")
    assert hookline.get_last_checkpoint(by_age[1], verify=False) == newest
    assert hookline.get_last_checkpoint(by_age[1]) == newest.with_name("step_000001")
    assert f"{newest}/model.safetensors has changed" in caplog.text
    for run in runs:
        run.close()


def test_finding_the_last_checkpoint_does_not_import_torch(pair: tuple[Path, Path]) -> None:
    code = (
        "import hookline, sys\n"
        f"assert hookline.get_last_checkpoint({str(pair[0].parent)!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
