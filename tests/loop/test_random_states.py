"""Resuming from checkpoints with any value in them: exactly, or one error and nothing changed."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_checkpoints import (
    change_header,
    change_manifest,
    change_state,
    copy_folder,
    snapshot,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_trees import ODD, TAGGED, paths_in, put
from resumed_training import loader, make_trainer, newest, objects_of, save_run

import hookline
from hookline import HooklineError

FUZZ = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAN = {"$": "float", "v": "nan"}
HUGE = [1 << 62, -1, 0, 1e300, {"$": "int", "v": hex(1 << 80)}, "x" * 10_000, NAN]
VALUES = ODD | TAGGED | st.sampled_from(HUGE)


class Restored(hookline.Hook):
    """Knows whether everything was restored: from then on, training writes."""

    is_restored = False

    def on_checkpoint_load(self) -> None:
        self.is_restored = True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def run(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed") / "runs" / saved.name


def restore(saved: Path, run: Path) -> Path:
    """Make the run as it was saved, and return its newest checkpoint."""
    shutil.rmtree(run.parent, ignore_errors=True)
    return newest(copy_folder(saved, run))


def resume(run: Path, checkpoint: Path) -> list[torch.Tensor] | None:
    """Resume; return the weights at the end, or None if it was refused with nothing changed."""
    watch = Restored()
    trainer = make_trainer(run.parent, watch)
    before, objects = snapshot(run.parent), objects_of(trainer)
    try:
        trainer.fit(loader(), resume_from=checkpoint)
    except HooklineError as error:
        message = str(error)
        assert 0 < len(message) < 10_000
        if not watch.is_restored:
            assert snapshot(run.parent) == before
            assert objects_of(trainer) == objects
            return None
    except Exception:  # of an optimizer or scheduler that has odd values of the right form
        assert watch.is_restored
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.fixture(scope="module")
def expected(saved: Path, run: Path) -> list[torch.Tensor]:
    """The weights after the checkpoint was resumed as it is."""
    weights = resume(run, restore(saved, run))
    assert weights is not None
    return weights


def assert_equal(weights: list[torch.Tensor] | None, expected: list[torch.Tensor]) -> None:
    assert weights is not None
    assert all(map(torch.equal, weights, expected))


def change_tree(tree: Any, data: st.DataObject) -> Any:
    """Replace, remove, rename or add one value of a tree; return the tree."""
    places = [place for place in paths_in(tree) if place]
    place = data.draw(st.sampled_from(places))
    *outer, key = place
    parent = tree
    for name in outer:
        parent = parent[name]
    how = data.draw(st.sampled_from(["replace", "remove", "rename", "swap"]))
    if how == "remove":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        parent[data.draw(st.text(max_size=8))] = parent.pop(key)
    elif how == "swap":  # a value of another place, which has a type that occurs
        other = tree
        for name in data.draw(st.sampled_from(places)):
            other = other[name]
        put(tree, place, copy.deepcopy(other))
    else:
        put(tree, place, data.draw(VALUES))
    return tree


@FUZZ
@given(data=st.data())
def test_any_value_in_a_state(
    saved: Path, run: Path, expected: list[torch.Tensor], data: st.DataObject
) -> None:
    checkpoint = restore(saved, run)
    before = json.loads((checkpoint / "state.json").read_text())
    changed = change_tree(copy.deepcopy(before), data)
    change_state(checkpoint, lambda _: changed)
    weights = resume(run, checkpoint)
    if json.dumps(changed) == json.dumps(before):
        assert_equal(weights, expected)


@FUZZ
@given(data=st.data())
def test_any_value_in_a_manifest_of_a_checkpoint(
    saved: Path, run: Path, expected: list[torch.Tensor], data: st.DataObject
) -> None:
    checkpoint = restore(saved, run)
    change_manifest(checkpoint, lambda manifest: change_tree(manifest, data))
    weights = resume(run, checkpoint)
    if weights is not None:  # it only describes the checkpoint
        assert_equal(weights, expected)


@FUZZ
@given(data=st.data())
def test_any_value_in_the_manifest_of_the_run(
    saved: Path, run: Path, expected: list[torch.Tensor], data: st.DataObject
) -> None:
    checkpoint = restore(saved, run)
    file = run / "manifest.json"
    file.write_text(json.dumps(change_tree(json.loads(file.read_text()), data)))
    weights = resume(run, checkpoint)
    if weights is not None:
        assert_equal(weights, expected)


@FUZZ
@given(data=st.data(), name=st.sampled_from(["model.safetensors", "state.safetensors"]))
def test_other_names_shapes_and_dtypes_of_tensors(
    saved: Path, run: Path, data: st.DataObject, name: str
) -> None:
    checkpoint = restore(saved, run)
    change_header(checkpoint, lambda header: change_tree(header, data), name)
    resume(run, checkpoint)


@FUZZ
@given(key=st.text(min_size=1, max_size=30), value=ODD)
def test_fields_of_a_later_version_change_nothing_or_are_refused(
    saved: Path, run: Path, expected: list[torch.Tensor], key: str, value: Any
) -> None:
    checkpoint = restore(saved, run)
    change_state(checkpoint, lambda tree: tree["state"].setdefault(key, value) and None)
    change_manifest(checkpoint, lambda manifest: manifest["info"].setdefault(key, value))
    weights = resume(run, checkpoint)
    if weights is not None:
        assert_equal(weights, expected)
