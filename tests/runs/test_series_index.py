"""One series of a long metrics log is read with an index, which never changes what is read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hookline
from hookline.runs import reader, series_index
from hookline.runs.series_index import INDEX, SeriesIndex

NAMES = ("lr", "lr/AdamW", "train/loss", "größe", 'with "quotes"', "back\\slash", "x" * 400)


@pytest.fixture(autouse=True)
def _index_short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MIN_BYTES", 1)


def to_line(name: str, step: int, value: float, ascii_only: bool = False) -> str:
    record = {"v": 1, "step": step, "epoch": 0, "time": 1.5 + step, "name": name, "kind": "scalar"}
    return json.dumps({**record, "value": value}, ensure_ascii=ascii_only) + "\n"


def write_log(folder: Path, lines: list[str]) -> hookline.OpenedRun:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"v": 1, "run_id": "r", "status": "stopped"}))
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return hookline.open_run(folder)


def read_twice(run: hookline.OpenedRun, name: str) -> list[list[dict[str, Any]]]:
    return [run.metrics(name), run.metrics(name)]


def make_lines(count: int = 30) -> list[str]:
    return [to_line(NAMES[i % 3], i, i / 7) for i in range(count)]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.floats(-9, 9), st.booleans()), min_size=1),
    st.sampled_from(NAMES),
)
def test_a_series_is_the_same_with_and_without_the_index(tmp_path_factory, values, name):
    lines = [to_line(n, i, value, ascii) for i, (n, value, ascii) in enumerate(values)]
    run = write_log(tmp_path_factory.mktemp("run"), lines)
    expected = [(i, value) for i, (n, value, _) in enumerate(values) if n == name]
    for rows in read_twice(run, name):
        assert [(row["step"], row["value"]) for row in rows] == expected
    assert (run.path / INDEX).is_file()


def test_the_second_reading_does_not_search_the_log(tmp_path, monkeypatch):
    run = write_log(tmp_path / "run", make_lines())
    first = run.metrics("lr")
    monkeypatch.setattr(reader, "read_rows", None)  # would be called by a search
    assert run.metrics("lr") == first
    with pytest.raises(TypeError):
        run.metrics("train/loss")


@pytest.mark.parametrize("change", ["longer", "shorter", "rewritten"])
def test_an_index_of_another_log_is_not_used(tmp_path, change):
    lines = make_lines()
    run = write_log(tmp_path / "run", lines)
    run.metrics("lr")
    if change == "longer":
        lines = [*lines, to_line("lr", 99, 9.0)]
    elif change == "shorter":
        lines = lines[:10]
    else:  # as long as before, with another order
        lines = [lines[1], lines[0], *lines[2:-3], *reversed(lines[-3:])]
    run = write_log(tmp_path / "run", lines)
    steps = [step for line in lines for step in [json.loads(line)] if step["name"] == "lr"]
    for rows in read_twice(run, "lr"):
        assert [row["step"] for row in rows] == [record["step"] for record in steps]


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{",
        b"[]",
        b'{"v": 1}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": []}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": {"lr": "all"}}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": {"lr": [5]}}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": {"lr": [-5]}}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": {"lr": [1.5]}}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": {"lr": [1e300]}}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": {"lr": [99999999999999999999]}}',
        b'{"v": 1, "size": %d, "tail": "%s", "series": {"lr": [[0]]}}',
    ],
)
def test_an_index_from_a_stranger_is_not_trusted(tmp_path, index):
    run = write_log(tmp_path / "run", make_lines())
    expected = run.metrics("lr")
    stored = json.loads((run.path / INDEX).read_text())
    if b"%d" in index:
        index = index % (stored["size"], stored["tail"].encode())
    (run.path / INDEX).write_bytes(index)
    assert read_twice(run, "lr") == [expected, expected]


def test_an_index_that_is_a_link_is_not_followed(tmp_path):
    run = write_log(tmp_path / "run", make_lines())
    (tmp_path / "other").write_text("mine")
    (run.path / INDEX).symlink_to(tmp_path / "other")
    assert len(run.metrics("lr")) == 10
    assert (tmp_path / "other").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    run = write_log(tmp_path / "run", make_lines())
    monkeypatch.setattr(series_index, "write_atomic", refuse)
    assert len(run.metrics("lr")) == 10
    assert not (run.path / INDEX).exists()


def test_a_run_that_is_still_training_and_a_glob_make_no_index(tmp_path):
    run = write_log(tmp_path / "run", make_lines())
    run.metrics("lr*")
    run.metrics()
    assert not (run.path / INDEX).exists()
    assert SeriesIndex(run.path / "metrics.jsonl", 1).read_lines("lr") is None
    run.metrics("lr")
    assert stat.S_ISREG(os.lstat(run.path / INDEX).st_mode)
