"""The record of a run: what is logged is in the files, whole, whatever happens to the process."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_loop import LOOPS
from leftovers import leave_unfinished_folder

import hookline
from hookline.context import LazyFloat, Metrics
from hookline.runs import Run, RunError, read_records
from hookline.runs.jsonl_file import JsonlFile, MetricsLog


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", config={"lr": 0.1}, seed=3, hooks=[{"name": "ema"}])


def records(run: Run, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    run.flush()
    return list(read_records(run.path / file))


def values(run: Run) -> list[Any]:
    return [record["value"] for record in records(run)]


def manifest(run: Run) -> Any:
    return json.loads((run.path / "manifest.json").read_text())


def test_a_new_run_says_what_it_is(run: Run) -> None:
    found = manifest(run)
    assert found == run.manifest
    assert found["version"] == 1
    assert found["run_id"] == run.id == run.path.name
    assert found["status"] == "training"
    assert found["seed"] == 3
    assert found["config"] == {"lr": 0.1}
    assert found["hooks"] == [{"name": "ema"}]
    assert found["command"] == sys.orig_argv
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {"torch", "hookline", "python", "cuda"}
    assert found["created"] == found["started"] == found["attempts"][0]["started"]
    assert found["ended"] is None


def test_ids_are_unique_and_sort_by_time(tmp_path: Path) -> None:
    ids = [Run.create(tmp_path, config={}, seed=0, hooks=[]).id for _ in range(50)]
    assert ids == sorted(set(ids))


def test_a_config_that_is_not_json_is_still_recorded(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    config = {
        "p": Path("a"),
        "f": math.inf,
        3: {1},
        "o": torch.float32,
        "loop": loop,
        "s": "\ud800",
    }
    config["t"] = (torch.tensor(2), np.float32(1.5), b"x", True, None)
    run = Run.create(tmp_path, config=config, seed=np.int64(4), hooks=[])
    found = manifest(run)
    assert found["seed"] == 4
    assert found["config"]["p"] == "a"
    assert found["config"]["f"] == "Infinity"
    assert found["config"]["3"] == [1]
    assert found["config"]["o"] == "torch.float32"
    assert found["config"]["t"] == [2, 1.5, "b'x'", True, None]


def test_one_line_per_record_with_the_fields_of_version_1(run: Run) -> None:
    run.log(3, 0, "train/loss", 0.5)
    (line,) = records(run)
    assert isinstance(line.pop("time"), float)
    assert line == {
        "v": 1, "step": 3, "epoch": 0, "name": "train/loss", "kind": "scalar", "value": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["train/loss", 'a "quoted\\ name\n', "é😀"])
@pytest.mark.parametrize("value", [0.1, -0.0, 1e300, 5e-324, LazyFloat(2.5), 3])
@pytest.mark.parametrize(("step", "epoch"), [(0, 0), (10**20, None), (1, 2.5)])
def test_every_line_is_json_whatever_the_name(
    run: Run, name: str, value: Any, step: int, epoch: Any
) -> None:
    run.log(step, epoch, name, value)
    (found,) = records(run)
    assert (found["step"], found["epoch"], found["name"]) == (step, epoch, name)
    assert repr(found["value"]) == repr(value)
    assert list(found) == ["v", "step", "epoch", "time", "name", "kind", "value"]


def test_numbers_are_read_when_the_buffer_is_written(run: Run) -> None:
    reads: list[str] = []

    def lazy(name: str) -> LazyFloat:
        return LazyFloat(lambda: reads.append(name) or 1.0)  # type: ignore[func-returns-value]

    run.log(0, 0, "a", lazy("a"))
    run.log_metrics(0, 0, {"b": lazy("b")})
    run.log_metrics(0, 0, Metrics({"val/c": lazy("c")}))
    assert reads == []
    assert values(run) == [1.0, 1.0, 1.0]
    assert reads == ["a", "b", "c"]
    assert [record["name"] for record in records(run)] == ["a", "b", "val/c"]


def test_a_tensor_is_recorded_as_it_was_when_it_was_logged(run: Run) -> None:
    total = torch.zeros((), requires_grad=True)
    array = np.zeros(1)
    for step in range(3):
        run.log(step, 0, "total", total)
        run.log_metrics(step, 0, Metrics({"array": array}))
        with torch.no_grad():
            total.add_(1)
        array += 1
    assert values(run) == [0, 0, 1, 1, 2, 2]


def test_the_buffer_keeps_no_graph_alive(run: Run) -> None:
    import gc
    import weakref

    def keeper(grad: torch.Tensor) -> None:
        pass

    hidden = torch.ones(3, requires_grad=True) * 2
    hidden.register_hook(keeper)  # lives as long as the graph
    loss = hidden.sum()
    graph = weakref.ref(keeper)
    run.log(0, 0, "loss", loss)
    del keeper, hidden, loss
    gc.collect()
    assert graph() is None


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_value_that_does_not_fit_is_recorded_as_text_and_no_other_is_lost(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> float:
        raise RuntimeError("device lost")

    run.log(0, 0, "before", 1.0)
    odd: list[Any] = ["word", [1], object(), Unprintable(), torch.ones(2), np.ones(2), 10**5000]
    for value in [*odd, {"a": 1}, "\ud800", LazyFloat(fails)]:
        run.log(0, 0, "odd", value)
    run.log(0, 0, "odd", "no histogram", kind="histogram")
    run.log(0, 0, "odd", torch.ones(2, 2, 2), kind="image")
    run.log(Unprintable(), 0, Unprintable(), 1.0)  # type: ignore[arg-type]
    run.log(0, 0, "after", 2.0)
    lines = records(run)
    odd_lines = [line for line in lines if line["name"] == "odd"]
    assert len(odd_lines) == 12
    assert {line["kind"] for line in odd_lines} == {"text"}
    assert [line["was"] for line in odd_lines] == ["scalar"] * 10 + ["histogram", "image"]
    assert odd_lines[0]["value"] == "'word'"
    assert (lines[0]["value"], lines[-1]["value"], len(lines)) == (1.0, 2.0, 15)
    assert "Cannot log 'odd' as image" in caplog.text


def test_text_and_histograms(run: Run) -> None:
    run.log(1, 0, "sample", "two\nlines “é”", kind="text")
    run.log(1, 0, "h", (torch.tensor([1, 2]), torch.tensor([0.0, 0.5, 1.0])), kind="histogram")
    run.log(1, 0, "h", {"counts": [3], "edges": [0, math.inf]}, kind="histogram")
    run.log(1, 0, "h", torch.tensor([0.0, 1.0, 1.0, math.nan]), kind="histogram")
    text, pair, mapping, raw = values(run)
    assert text == "two\nlines “é”"
    assert pair == {"counts": [1, 2], "edges": [0.0, 0.5, 1.0]}
    assert mapping == {"counts": [3], "edges": [0, "Infinity"]}
    assert (raw["counts"][0], raw["counts"][-1], raw["nonfinite"]) == (1, 2, 1)
    assert (len(raw["edges"]), raw["edges"][0], raw["edges"][-1]) == (65, 0.0, 1.0)
    assert [r["kind"] for r in records(run)] == ["text"] + ["histogram"] * 3


def pixels(path: Path) -> tuple[tuple[int, ...], bytes]:
    """A reader of the PNG files that are written here: size, colour type, raw rows."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, chunks = 8, {}
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        tagged = data[position + 4 : position + 8 + length]
        (crc,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert crc == zlib.crc32(tagged)
        chunks[tagged[:4]] = tagged[4:]
        position += 12 + length
    return struct.unpack(">IIBB", chunks[b"IHDR"][:10]), zlib.decompress(chunks[b"IDAT"])


def test_images_become_png_files_in_media(run: Run) -> None:
    colour = torch.zeros(3, 2, 5)
    colour[0, 1, 4] = 1.0
    grey = np.array([[0, 128], [255, 7]], dtype=np.uint8)
    for value in (colour, colour.permute(1, 2, 0).numpy(), grey):
        run.log(7, 0, "val/a sample", value, kind="image")
    first, second, third = values(run)
    assert first == {"path": "media/val-a-sample-7.png", "width": 5, "height": 2}
    assert len({first["path"], second["path"], third["path"]}) == 3
    row = b"\x00" + bytes(15)
    expected = ((5, 2, 8, 2), row + b"\x00" + bytes(12) + b"\xff\x00\x00")
    assert pixels(run.path / first["path"]) == pixels(run.path / second["path"]) == expected
    assert pixels(run.path / third["path"]) == ((2, 2, 8, 0), b"\x00\x00\x80\x00\xff\x07")
    png = (run.path / first["path"]).read_bytes()
    run.log(8, 0, "same", png, kind="image")
    assert (run.path / "media/same-8.png").read_bytes() == png


def test_events_are_there_at_once(run: Run) -> None:
    run.event("toggle", hook="ema", step=torch.tensor(4), time="mine", odd=object())
    (event,) = read_records(run.path / "events.jsonl")
    assert (event["v"], event["kind"], event["hook"], event["step"]) == (1, "toggle", "ema", 4)
    assert event["time_"] == "mine"
    assert isinstance(event["time"], float)


def test_the_buffer_is_bounded_by_count_and_by_time(tmp_path: Path) -> None:
    metrics_log = MetricsLog(JsonlFile(tmp_path / "a"), max_records=3, seconds=1e9)

    def written() -> int:
        return len(list(read_records(tmp_path / "a")))

    def add(metrics_log: MetricsLog, late: float = 0.0) -> None:
        metrics_log.add((0, 0, metrics_log._flushed + late, "x", "scalar", 1.0))

    add(metrics_log)
    add(metrics_log)
    assert written() == 0
    add(metrics_log)
    assert written() == 3
    patient = MetricsLog(metrics_log.file, max_records=10**9, seconds=60.0)
    add(patient, 59.0)
    assert written() == 3
    add(patient, 61.0)
    assert written() == 5
    add(patient, -5.0)  # the clock was set back
    assert written() == 6


def test_a_flush_inside_a_flush_does_not_hang(run: Run) -> None:
    def read() -> float:  # as a signal's handler would
        run.log(1, 0, "inner", 2.0)
        run.flush()
        return 1.0

    run.log(0, 0, "outer", LazyFloat(read))
    assert sorted(values(run)) == [1.0, 2.0]


def test_closing_writes_everything_and_how_it_ended(run: Run) -> None:
    run.log(0, 0, "x", 1.0)
    run.update(note="hello", lr=math.nan)
    run.close("error", error=ValueError("bad"))
    found = manifest(run)
    assert found["status"] == found["attempts"][0]["status"] == "error"
    assert found["ended"] == found["attempts"][0]["ended"] > found["started"]
    assert found["last_error"] == "ValueError: bad"
    assert (found["note"], found["lr"], found["lost_records"]) == ("hello", "NaN", 0)
    assert values(run) == [1.0]
    run.close("completed")  # a second time changes nothing
    assert manifest(run) == found
    for use in (lambda: run.log(0, 0, "x", 1.0), lambda: run.event("x"), lambda: run.update(a=1)):
        with pytest.raises(RunError, match="closed"):
            use()


def test_resuming_keeps_the_id_and_adds_a_part(run: Run) -> None:
    run.log(0, 0, "x", 1.0)
    run.close("interrupted", error="SIGTERM")
    leave_unfinished_folder(run.path, "manifest.json")
    again = Run.open(run.path, resume=True)
    assert again.id == run.id
    assert manifest(again)["status"] == "training"
    assert [part["status"] for part in manifest(again)["attempts"]] == ["interrupted", "training"]
    again.log(1, 0, "x", 2.0)
    again.close("completed")
    assert [part["status"] for part in manifest(again)["attempts"]] == ["interrupted", "completed"]
    assert manifest(again)["last_error"] is None
    assert manifest(again)["created"] == run.manifest["created"]
    assert values(again) == [1.0, 2.0]
    assert not list(run.path.glob(".tmp-*"))


def test_opening_for_reading_writes_nothing(run: Run) -> None:
    run.close()
    before = {p.name: p.stat().st_mtime_ns for p in run.path.iterdir()}
    reading = Run.open(str(run.path))
    assert reading.manifest["status"] == "completed"
    with pytest.raises(RunError, match="reading"):
        reading.log(0, 0, "x", 1.0)
    reading.close()
    assert {p.name: p.stat().st_mtime_ns for p in run.path.iterdir()} == before


LEAVES = """
import os, sys
from hookline.runs import Run
run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
run.log(1, 0, "x", 1.0)
if os.fork() == 0:
    sys.exit()  # the child has a copy of the buffer
os.wait()
run.log(2, 0, "x", 2.0)
sys.exit(sys.argv[2])
"""


def test_a_program_that_ends_without_closing_its_run_loses_no_records(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES, str(tmp_path), "bye"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    (path,) = tmp_path.iterdir()
    assert [record["value"] for record in read_records(path / "metrics.jsonl")] == [1.0, 2.0]
    assert json.loads((path / "manifest.json").read_text())["status"] == "training"


def test_a_garbage_collected_run_writes_its_metrics_and_closes_its_files(
    tmp_path: Path,
) -> None:
    import gc

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    path = run.path
    run.log(1, 0, "x", 1.0)
    del run
    gc.collect()
    assert len(list(read_records(path / "metrics.jsonl"))) == 1
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# -- kills and full disks -------------------------------------------------------------------------

FULL = """
import logging, resource, sys
from hookline.runs import Run
logging.basicConfig(format="%(message)s", stream=sys.stdout)
run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
for step in range(900):
    run.log(step, 0, "x", 1.0)
    if step % 10 == 0:
        run.flush()
run.log(900, 0, "picture", b"no", kind="image")
run.flush()
assert run.position() is None
if sys.argv[2] == "later":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run.log(1000, 0, "x", 1.0)
run.close()
"""


@pytest.mark.parametrize("space", ["later", "never"])
def test_a_full_disk_does_not_stop_training_and_is_counted(tmp_path: Path, space: str) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path), space]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.count("Cannot write") == 1
    (path,) = tmp_path.iterdir()
    steps = [record["step"] for record in read_records(path / "metrics.jsonl")]
    lost = json.loads((path / "manifest.json").read_text())["lost_records"]
    if space == "later":
        assert steps == [*range(901), 1000]  # what waited, on a fresh line
        assert lost == 0
    else:
        assert 300 < len(steps) < 800
        assert steps == [*range(len(steps))]
        assert lost == 902 - len(steps)


FULL_EVENTS = """
import resource, sys
from hookline.runs import Run
run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
run.event("first")
size = (run.path / "events.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
run.event("cut off")
"""


def test_an_event_that_a_full_disk_has_cut_off_is_no_damage_of_the_resumed_run(tmp_path):
    subprocess.run([sys.executable, "-c", FULL_EVENTS, str(tmp_path)], check=True)
    (path,) = tmp_path.iterdir()
    assert not (path / "events.jsonl").read_text().endswith("\n")
    run = Run.open(path, resume=True)
    run.event("second")
    run.close()
    lines = (path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["first", "second"]


def test_a_last_event_that_lacks_only_its_line_feed_is_kept(run):
    run.event("first")
    run.close()
    file = run.path / "events.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    resumed = Run.open(run.path, resume=True)
    resumed.event("second")
    resumed.close()
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["first", "second"]


def test_a_manifest_that_cannot_be_written_is_logged_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    (run.path / "manifest.json").unlink()
    (run.path / "manifest.json").mkdir()  # which no file replaces
    with caplog.at_level(logging.WARNING):
        run.update(a=1)
        run.update(a=2)
        run.close()
    assert caplog.text.count("Cannot write") == 1
    assert not list(run.path.glob(".tmp-*"))


def test_a_folder_that_cannot_be_written_is_a_clear_error_at_creation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot create a run"):
        Run.create(tmp_path / "file", config={}, seed=0, hooks=[])


@pytest.mark.parametrize("name", ["trainer", "bare loop"])
def test_training_goes_on_when_a_network_file_system_loses_the_handle_of_the_metrics(
    tmp_path, monkeypatch, caplog, name
):
    real, broken = os.fstat, False

    def fstat(handle: int) -> os.stat_result:
        found, files = real(handle), tmp_path.glob("runs/*/metrics.jsonl")
        if broken and any(file.stat().st_ino == found.st_ino for file in files):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return found

    class Break(hookline.Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            nonlocal broken
            trainer.run.flush()
            broken = step in (3, 4)
            trainer.log("a/step", step)
            trainer.run.flush()
            if step == 3:
                trainer.save_checkpoint()

    monkeypatch.setattr(os, "fstat", fstat)
    LOOPS[name]([Break()], tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "manifest.json").read_text())["status"] == "completed"
    assert json.loads((run / "manifest.json").read_text())["lost_records"] == 0
    assert (run / "checkpoints" / "step_000003" / "manifest.json").is_file()
    assert caplog.text.count("lines wait in memory until it can be written") == 1
    logged = [r["value"] for r in read_records(run / "metrics.jsonl") if r["name"] == "a/step"]
    assert logged == [1, 2, 3, 4, 5, 6]
