"""Which checkpoints are kept, and how one is removed safely."""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    set_pointer,
)
from hookline.checkpoint.atomic_files import remove_leftovers
from hookline.checkpoint.catalog import scan_checkpoints
from hookline.checkpoint.retention import (
    KeepRules,
    RetainedCheckpoint,
    Retention,
    remove_checkpoint,
)


def write(path: Path, retention: Retention | None = None, step: int = 0, run_id="r") -> Path:
    """Write a checkpoint as the trainer does, with the state of the writer that requested it."""
    hooks = {} if retention is None else {"hook": {"checkpoints": retention.state_dict()}}
    info = {"step": step, "run_id": run_id}
    return save_checkpoint(path, model={"w": torch.zeros(2)}, state={"hooks": hooks}, info=info)


def opened(folder: Path, **options) -> Retention:
    retention = Retention(**({"keep_best": 1} | options))
    retention.open(folder, resumed=False)
    return retention


def save(retention: Retention, name: str, score: float | None = None, step: int = 0) -> Path:
    path = write(retention.reserve(name, step, score), retention, step)
    set_pointer(path.parent, "last", path)  # as the trainer does
    assert retention.add_saved(path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


# -- rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("min", [1, 3, 0, 2]), ("max", [2, 0, 1, 3])])
def test_the_best_comes_first_and_of_equals_the_earlier(mode, expected):
    assert KeepRules(best=-1, mode=mode).rank([2.0, 1.0, 3.0, 1.0]) == expected


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_ranks_last_and_is_never_the_best(tmp_path, mode, bad):
    assert KeepRules(best=-1, mode=mode).rank([bad, 5.0]) == [1, 0]
    retention = opened(tmp_path, mode=mode)
    save(retention, "a", bad)
    assert retention.best is None
    assert not (tmp_path / "best").exists()
    save(retention, "b", bad)
    assert names(tmp_path) == ["b"], "without a score the newest stays"
    save(retention, "c", 5.0)
    assert retention.best is not None
    assert retention.best.name == "c"
    assert not retention.would_keep(0, bad)
    assert not retention.would_keep(0, 5.0), "an equal score does not displace the earlier one"
    assert names(tmp_path) == ["c"]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(allow_nan=True) | st.integers(0, 3).map(float)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.none() | st.integers(1, 4),
)
def test_would_keep_is_true_for_exactly_what_is_kept(saves, keep_best, keep_last, keep_every):
    """And the state for resuming is the same, whenever the checkpoints become durable."""
    rules = {"keep_best": keep_best, "keep_last": keep_last, "keep_every": keep_every}
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):  # syncing takes long
        folder = Path(name)
        soon, late = opened(folder / "soon", **rules), opened(folder / "late", **rules)
        step = 0
        waiting: list[Path] = []
        made: list[RetainedCheckpoint] = []
        for i, (steps, score) in enumerate(saves):
            step += steps
            expected = soon.would_keep(step, score)
            assert late.would_keep(step, score) == expected
            if not expected:
                continue
            assert soon.add_saved(write(soon.reserve(f"c{i}", step, score)))
            assert f"c{i}" in [one.name for one in soon.saved]
            made.append(RetainedCheckpoint("", step, i, score))
            waiting.append(write(late.reserve(f"c{i}", step, score)))
            assert late.state_dict() == soon.state_dict() or math.isnan(score)
        for path in waiting:
            late.add_saved(path)
        if waiting:
            accepted = [
                replace(one, name=path.name) for one, path in zip(made, waiting, strict=True)
            ]
            best = KeepRules(best=keep_best).rank([one.score for one in accepted])
            ranked = [accepted[i] for i in best]
            newest = accepted[max(0, len(accepted) - keep_last) :]
            firsts = {one.step // (keep_every or 99): one for one in reversed(accepted)}
            kept = [*ranked, *newest, *(one for interval, one in firsts.items() if interval)]
            assert names(folder / "late") == sorted({one.name for one in kept})
            assert names(folder / "late") == names(folder / "soon")


# -- what is kept ---------------------------------------------------------------------------------


def test_a_checkpoint_that_last_or_best_names_is_never_removed(tmp_path):
    retention = opened(tmp_path)
    a = save(retention, "a", 3.0)
    b = write(retention.reserve("b", 1, 2.0))
    set_pointer(tmp_path, "last", a)  # somebody points it elsewhere
    retention.add_saved(b)
    assert names(tmp_path) == ["a", "b"]
    c = write(retention.reserve("c", 2, 1.0))
    set_pointer(tmp_path, "last", c)
    retention.add_saved(c)
    assert names(tmp_path) == ["c"], "and is when nothing names it any more"


def test_checkpoints_of_others_are_not_removed(tmp_path):
    retention = opened(tmp_path)
    other = write(tmp_path / "other")
    assert not retention.add_saved(other)
    save(retention, "a", 2.0)
    save(retention, "b", 1.0)
    assert names(tmp_path) == ["b", "other"]
    elsewhere = write(tmp_path / "sub" / "c")
    retention.reserve("c", 0, 0.0)
    assert not retention.add_saved(elsewhere), "the same name in another folder"


def test_a_checkpoint_that_somebody_replaced_is_forgotten_not_removed(tmp_path):
    retention = opened(tmp_path)
    a = save(retention, "a", 2.0)
    remove_checkpoint(a)
    write(a)  # another one under its name
    save(retention, "b", 1.0)
    assert names(tmp_path) == ["a", "b"]
    assert [one.name for one in retention.saved] == ["b"]


def test_a_checkpoint_that_failed_leaves_its_place_to_the_next(tmp_path):
    retention = opened(tmp_path, keep_best=1, keep_every=10)
    failed = retention.reserve("x", 12, 1.0)
    assert not retention.would_keep(13, 2.0)
    assert retention.discard(failed).step == 12
    assert retention.discard(failed) is None
    assert retention.would_keep(13, 2.0)
    assert retention.reserve("x", 13, 2.0) == failed, "the name is free again"
    assert [one["step"] for one in retention.state_dict()["kept"]] == [13]


def test_nothing_is_removed_before_its_successor_is_durable(tmp_path):
    retention = opened(tmp_path, keep_last=1)
    save(retention, "a", 2.0)
    b, c = retention.reserve("b", 1, 1.0), retention.reserve("c", 2, 0.5)
    retention.rescore(2, 0.1)
    assert names(tmp_path) == ["a"]
    assert retention.best.name == "a"
    retention.discard(b)
    assert names(tmp_path) == ["a"]
    set_pointer(tmp_path, "last", write(c))
    retention.add_saved(c)
    assert names(tmp_path) == ["c"]
    assert find_checkpoint(tmp_path / "best").name == "c"


def test_two_writers_that_share_files_do_not_harm_each_other(tmp_path):
    one, two = opened(tmp_path), opened(tmp_path)
    a, b = write(one.reserve("a", 1, 2.0), one, 1), two.reserve("b", 1, 2.0)
    b.mkdir()
    for file in a.iterdir():  # as the saver does for two requests at one boundary
        (b / file.name).hardlink_to(file)
    assert one.add_saved(a)
    assert two.add_saved(b)
    save(one, "better", 1.0)
    assert names(tmp_path) == ["b", "better"]
    assert load_checkpoint(b).model["w"].tolist() == [0.0, 0.0]


# -- names ----------------------------------------------------------------------------------------


def test_two_writers_never_get_the_same_name(tmp_path):
    one, two = opened(tmp_path), opened(tmp_path, mode="max")
    first, second = one.reserve("x", 1, 1.0), two.reserve("x", 1, 1.0)
    assert (first.name, second.name) == ("x", "x_2")
    write(first)
    write(second)
    assert not two.add_saved(first)
    assert one.add_saved(first)
    assert not one.add_saved(second)
    assert two.add_saved(second)


# -- removing -------------------------------------------------------------------------------------


def test_a_folder_with_a_file_of_the_user_is_not_removed(tmp_path, caplog):
    path = write(tmp_path / "a")
    (path / "notes.txt").write_text("mine")
    assert not remove_checkpoint(path)
    assert (path / "notes.txt").read_text() == "mine"
    assert find_checkpoint(path) == path
    assert "'notes.txt'" in caplog.text


KILLED_AT = ("mkdir", "open", "rename", "replace", "rmdir", "scandir", "stat", "unlink", "write")


def kill_at(number: int, work: Callable[[], object]) -> bool:
    """Run this in another process that ends at a system call; return whether it got that far."""
    pid = os.fork()
    if pid == 0:
        calls = count(1)

        def wrap(call: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*args: object, **kwargs: object) -> object:
                if next(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapper

        for name in KILLED_AT:
            setattr(os, name, wrap(getattr(os, name)))
        os.fsync = lambda _: None
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.soak(every=3)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_kill_at_any_system_call_of_pruning_leaves_complete_checkpoints_only(tmp_path, first):
    for number in count(first, 3):
        folder = tmp_path / f"{number}"
        retention = opened(folder)
        with mock.patch("os.fsync"):  # syncing takes long, and a kill does not need it
            save(retention, "a", 2.0, 1)
            path = write(retention.reserve("b", 2, 1.0), retention, 2)
            set_pointer(folder, "last", path)
        if not kill_at(number, lambda r=retention, p=path: r.add_saved(p)):
            break
        scan = scan_checkpoints(folder)
        assert set(names(folder)) - set(scan.damage) >= {"b"}
        assert scan.damage == {}, "nothing half removed"
        for found in scan.complete:
            load_checkpoint(found)
        again = resumed(folder, path, keep_best=1)
        assert [one.name for one in again.saved] == ["b"]
        assert find_checkpoint(folder / "best") == path
        remove_leftovers(folder)
        assert sorted(p.name for p in folder.iterdir()) == ["b", "best", "last"]
    assert number > 20


# -- resuming -------------------------------------------------------------------------------------


def resumed(folder: Path, path: Path, **options) -> Retention:
    """Return a new writer with the state that the checkpoint has, as a resumed run has it."""
    again = Retention(**({"keep_best": 2} | options))
    again.load_state_dict(load_checkpoint(path).state["hooks"]["hook"]["checkpoints"])
    again.open(folder, resumed=True)
    again.reconcile(path, writer="hook", run_id=load_checkpoint(path).info["run_id"])
    return again


def test_a_reserved_checkpoint_that_was_never_saved_is_forgotten(tmp_path):
    retention = opened(tmp_path, keep_best=2)
    retention.reserve("b", 1, 1.0)
    other = write(tmp_path / "other", retention, 2)
    assert resumed(tmp_path, other).saved == ()


def test_one_that_was_to_be_saved_with_the_checkpoint_resumed_from_is_made_from_it(tmp_path):
    retention = opened(tmp_path, keep_best=2)
    retention.reserve("b", 1, 1.0)
    other = write(tmp_path / "other", retention, 1)  # killed before it was written as b, too
    again = resumed(tmp_path, other)
    assert [(one.name, one.score) for one in again.saved] == [("b", 1.0)]
    b, first = load_checkpoint(tmp_path / "b"), load_checkpoint(other)
    assert (b.state, b.info) == (first.state, first.info)
    assert (tmp_path / "b" / "state.json").samefile(other / "state.json")


def test_a_checkpoint_that_vanished_is_forgotten_and_logged(tmp_path, caplog):
    caplog.set_level("INFO", "hookline")
    retention = opened(tmp_path, keep_best=2)
    a, b = save(retention, "a", 1.0, step=1), save(retention, "b", 2.0, step=2)
    remove_checkpoint(a)
    again = resumed(tmp_path, b)
    assert [one.name for one in again.saved] == ["b"]
    assert "forgotten: 'a'" in caplog.text


def test_what_was_saved_after_the_checkpoint_resumed_from_is_found_again(tmp_path):
    retention = opened(tmp_path, keep_best=2)
    a = save(retention, "a", 2.0, 1)
    save(retention, "b", 1.0, 2)
    again = resumed(tmp_path, a)
    assert [(one.name, one.score, one.number) for one in again.saved] == [
        ("a", 2.0, 0),
        ("b", 1.0, 1),
    ]
    assert find_checkpoint(tmp_path / "best").name == "b"
    save(again, "c", 1.5, 2)
    assert [one.number for one in again.saved] == [1, 2]
    assert names(tmp_path) == ["b", "c"]


def test_only_certainly_own_checkpoints_are_found_again(tmp_path):
    retention = opened(tmp_path)
    a = save(retention, "a", 2.0, 1)
    write(tmp_path / "users", retention, 1)  # save_checkpoint() of the user: not in its own state
    write(tmp_path / "without state")
    other = opened(tmp_path)
    write(other.reserve("of another run", 2, 0.0), other, 2, run_id="other")
    third = opened(tmp_path)
    hooks = {"second": {"checkpoints": third.state_dict()}}
    path = third.reserve("of another hook", 3, 0.0)
    hooks = {"second": {"checkpoints": third.state_dict()}}
    save_checkpoint(path, model={}, state={"hooks": hooks}, info={"step": 3, "run_id": "r"})
    before = names(tmp_path)
    again = resumed(tmp_path, a, keep_best=1)
    assert [one.name for one in again.saved] == ["a"]
    save(again, "b", 1.0, 4)
    assert names(tmp_path) == sorted({*before, "b"} - {"a"})


def test_the_checkpoint_resumed_from_stays_until_the_next_is_durable(tmp_path):
    retention = opened(tmp_path, keep_best=2)
    a = save(retention, "a", 2.0, 1)
    save(retention, "b", 1.0, 2)
    again = resumed(tmp_path, a, keep_best=1)
    assert names(tmp_path) == ["a", "b"]
    save(again, "c", 3.0, 2)
    assert names(tmp_path) == ["b", "c"], "c, because `last` names it"


def test_best_that_cannot_be_moved_is_an_error_after_the_rest_is_done(tmp_path):
    retention = opened(tmp_path)
    save(retention, "a", 3.0)
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()
    path = write(retention.reserve("b", 1, 2.0), retention, 1)
    set_pointer(tmp_path, "last", path)
    with pytest.raises(CheckpointError, match="best could not be written"):
        retention.add_saved(path)
    assert names(tmp_path) == ["b", "best"]
    (tmp_path / "best").rmdir()
    save(retention, "c", 1.0)
    assert find_checkpoint(tmp_path / "best").name == "c", "and is tried again"
