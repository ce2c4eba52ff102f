"""Reports of strange and hostile runs are made."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline
from hookline.report import make_report
from hookline.report.facts import describe_facts
from hookline.report.page_data import encode_spike
from hookline.report.page_media import Media
from hookline.runs.media import save_image

HUGE = 10**400  # more than a float can hold
Record = dict[str, Any]


def scalar(step: Any, name: str, value: Any, **fields: Any) -> Record:
    seconds = 1.7e9 + (step or 0)
    return {
        "v": 1,
        "step": step,
        "time": seconds,
        "name": name,
        "kind": "scalar",
        "value": value,
    } | (fields)


def event(kind: str, **fields: Any) -> Record:
    return {"v": 1, "time": 1.7e9, "kind": kind, **fields}


def write_run(
    folder: Path, metrics: Iterable[Record] = (), events: Iterable[Record] = (), **fields: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    manifest = {"format": "hookline.run", "version": 1, "run_id": folder.name, "attempts": []}
    manifest |= {"status": "completed", "started": "2026-11-01T00:00:00.000000+00:00", **fields}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for name, records in (("metrics", metrics), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def shown_data(report: Any) -> Any:
    """Return what the page's script reads."""
    text = report.html.partition('id="data">')[2].partition("</script>")[0]
    return json.loads(text)


LOSSES = [scalar(i, "train/loss", float(i)) for i in range(10)]
STRANGE: dict[str, tuple[list[Record], list[Record]]] = {
    "no steps": ([], [event("start", step=0), event("end", step=0, status="completed")]),
    "one step": ([scalar(1, "train/loss", 1.5)], []),
    "findings of other types": (
        LOSSES,
        [
            event("debug_finding"),
            event("debug_finding", step=HUGE, probe=[], module={}, where=5, message=[1]),
            event("debug_finding", step="x", module="", condition=None, message=None),
        ],
    ),
    "only NaN": ([scalar(i, n, "NaN") for i in range(3) for n in ("train/loss", "val/loss")], []),
    "infinite gradients": (
        [scalar(i, f"gradients/{n}/norm", "Infinity") for i in range(3) for n in "ab"],
        [],
    ),
    "huge values": (
        [scalar(i, "train/loss", v) for i, v in enumerate([1.7e308, 1.7e308, -1.7e308, 5e-324])],
        [
            event("end", step=HUGE, skipped_steps=HUGE, tokens_seen=HUGE, times={"data": 1.7e308}),
            event(
                "end", times={"data": 1.7e308}, hooks={"hooks": [{"name": "a", "share": 1e308}] * 9}
            ),
            event("loss_spike", step=HUGE, loss=HUGE, values={"a": [[HUGE, HUGE], [1, 1.7e308]]}),
            event("loss_spike", step=2, loss=1.0, values={"a": [[0, -1.7e308], [2, 1.7e308]]}),
            event("hooks", step=HUGE, hooks={"a": "disabled"}),
            event("checkpoint", step=HUGE, path=HUGE, tokens_seen=5),
        ],
    ),
    "no steps or times": (
        [scalar(None, "train/loss", 1.0), scalar(1, "train/x", 1.0, time=None)] * 3,
        [event("checkpoint", step=None, path=None)],
    ),
    "steps that go back": ([scalar(i % 50, "train/loss", i) for i in range(120)], []),
    "one step again and again": ([scalar(5, "train/loss", i) for i in range(120)], []),
    "fields of other types": (
        LOSSES,
        [
            event("end", step="x", times=[1], hooks=[1], reason={}, error=[1], traceback=5),
            event("hooks", step=[], hooks=[1]),
            event("hook_failed", step={}, hook=None, error=None, traceback={}),
            event("loss_spike", step=[], loss=[], z={}, batches=[1], values=[1]),
            event(
                "loss_spike", step=1, loss="x", batches={}, values={"a": 5, "b": [1, [2], [1, "x"]]}
            ),
            event("stop", by={}, reason=[]),
            event("signal", signal={}),
        ],
    ),
    "names of JavaScript": (
        [
            scalar(i, name, i)
            for i in range(3)
            for name in (
                "__proto__",
                "train/constructor",
                "gradients/__proto__/norm",
                "gradients/b/norm",
            )
        ],
        [event("end", times={"__proto__": 3}, status="completed")],
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_report_of_a_strange_run_is_made(name: str, tmp_path: Path) -> None:
    report = make_report(write_run(tmp_path / "run", *STRANGE[name]))
    (facts,) = report.facts["runs"]
    json.dumps(facts, allow_nan=False)
    assert facts["status"] == "completed"
    assert not any("nan" in line or "None" in line for line in describe_facts(facts))
    assert len(shown_data(report)["runs"]) == 1


def describe(folder: Path) -> tuple[Any, str]:
    """Return the badge of a run in its report, and what the report says about it."""
    (run,) = shown_data(make_report(folder))["runs"]
    return run["badge"], "\n".join(run["sentences"])


def not_finite_from(start: int, *names: str, steps: int = 8) -> list[Record]:
    return [scalar(i, n, "NaN" if i >= start else 1.0) for i in range(1, steps + 1) for n in names]


NORMS = tuple(f"gradients/{layer}/norm" for layer in ("wte.weight", "h.1.weight", "head.weight"))


@pytest.mark.parametrize(
    ("status", "tone"),
    [
        ("completed", "good"),
        *(("stopped", ""), ("training", ""), ("interrupted", "warn"), ("preempted", "warn")),
        *(("error", "bad"), ("lost", "bad"), ("something else", "bad")),
    ],
)
def test_only_a_completed_run_is_green(status: str, tone: str, tmp_path: Path) -> None:
    assert describe(write_run(tmp_path / "run", LOSSES, status=status))[0] == [tone, status]
    (folder,) = tmp_path.iterdir()
    (tone, _), _ = describe(write_run(folder, not_finite_from(5, "train/loss"), status=status))
    assert tone == "bad"


def test_a_loss_that_was_not_finite_once_is_not_green(tmp_path: Path) -> None:
    metrics = [*not_finite_from(3, "train/loss", steps=3), scalar(4, "train/loss", 1.0)]
    badge, text = describe(write_run(tmp_path / "run", metrics))
    assert badge == ["warn", "completed, with values that were not finite"]
    assert "it was not finite once" in text


def test_no_layer_is_blamed_for_a_nan_in_all_gradients(tmp_path: Path) -> None:
    metrics = not_finite_from(5, "train/loss", *NORMS)
    (tone, _), text = describe(write_run(tmp_path / "unknown", metrics))
    assert tone == "bad"
    assert "The gradients of all 3 layers are not finite, first at step 5" in text
    assert "in all layers at once" in text
    assert "came from is unknown" in text
    assert "wte" not in text
    assert "explode" not in text
    found = {"probe": "debug", "module": "h.1.mlp.c_fc", "condition": "nonfinite"}
    found |= {"where": "output", "message": "16 of 512 values are NaN."}
    events = [event("debug_finding", step=5, **found | {"probe": name}) for name in ("a", "b")]
    _, text = describe(write_run(tmp_path / "found", metrics, events))
    assert "Debug found values that are not finite in the output of h.1.mlp.c_fc at step 5." in text
    assert "unknown" not in text


def test_gradients_are_called_good_only_if_they_were_watched_and_finite(tmp_path: Path) -> None:
    good = "no gradient of the 3 layers vanishes or explodes"
    watched = not_finite_from(99, *NORMS)
    loss_is_nan = not_finite_from(5, "train/loss")
    assert good in describe(write_run(tmp_path / "a", [*LOSSES, *watched]))[1]
    assert "gradient of" not in describe(write_run(tmp_path / "b", LOSSES))[1]
    assert "vanish" not in describe(write_run(tmp_path / "c", [*loss_is_nan, *watched]))[1]
    assert "vanish" not in describe(write_run(tmp_path / "d", not_finite_from(5, *NORMS)))[1]


def test_layers_are_in_the_models_order_if_it_is_known(tmp_path: Path) -> None:
    names = ["h.1.weight", "head.weight", "wte.weight"]
    recorded = [f"gradients/{name}/norm" for name in names]
    recorded += [f"activations/{n}/std" for n in ("2", "relu", "0")]
    metrics = not_finite_from(99, *recorded)
    model = ["wte.weight", "h.1.weight", "h.1.bias", "head.weight"]

    def drawn(**fields: Any) -> tuple[list[str], str, list[str]]:
        (run,) = shown_data(make_report(write_run(tmp_path / "run", metrics, **fields)))["runs"]
        norms, stds = run["layers"]["gradients"]["norm"], run["layers"]["activations"]["std"]
        return [n for n, _ in norms["series"]], norms["order"], [n for n, _ in stds["series"]]

    as_recorded = ["2", "relu", "0"]
    assert drawn() == (names, "record", as_recorded)
    assert drawn(parameter_names=model) == (
        *(["wte.weight", "h.1.weight", "head.weight"], "model"),
        as_recorded,
    )
    assert drawn(parameter_names=model[1:]) == (names, "record", as_recorded)  # not all are known


def test_a_run_has_the_models_order_for_its_gradients(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    weights, biases = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    optimizer = torch.optim.SGD([{"params": biases[::-1]}, {"params": weights[::-1]}], 0.1)
    hooks = [hookline.GradientMonitor(1)]
    with hookline.attach(model, optimizer, hooks=hooks, runs=tmp_path) as session:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    (run,) = shown_data(make_report(session.run.path))["runs"]
    norms = run["layers"]["gradients"]["norm"]
    assert norms["order"] == "model"
    assert [name for name, _ in norms["series"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_what_is_not_known_of_a_run_is_not_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", git={"commit": None, "problem": "git is not installed"})
    assert "an unknown number of steps" in describe(run)[1]
    assert "loss spike" not in describe(run)[1]  # no hook looked for any
    (data,) = shown_data(make_report(run))["runs"]
    assert ["Commit", "Unknown: git is not installed"] in data["manifest"]
    git = {"commit": "ab", "dirty": False, "untracked": 3}
    hooks = [{"name": "spikes", "class": "hookline.LossSpikeDetector"}]
    run = write_run(tmp_path / "b", [], [event("end", step=7)], git=git, hooks=hooks)
    assert "7 steps" in describe(run)[1]
    assert "No loss spike, skipped step" in describe(run)[1]
    (data,) = shown_data(make_report(run))["runs"]
    tree = "Tracked files were as in the commit. 3 files or folders were not tracked."
    assert ["Working tree", tree] in data["manifest"]


def test_the_end_of_an_earlier_attempt_is_not_that_of_the_run(tmp_path: Path) -> None:
    attempt = {"started": "2026-11-01T00:00:00+00:00", "ended": "2026-11-01T00:00:10+00:00"}
    hooks = {"hooks": [{"name": "slow", "share": 0.5, "seconds": 1.0}]}
    events = [event("start", step=0), event("end", step=5, reason="an hour is over", hooks=hooks)]
    events.append(event("start", step=5))
    metrics = [scalar(i, "train/loss", 1.0) for i in range(10)]
    run = write_run(tmp_path / "run", metrics, events, attempts=[attempt, attempt], status="lost")
    text = describe(run)[1]
    assert "an hour is over" not in text
    assert "Hooks took about 50.00% of the last attempt that ended" in text


def test_steps_before_a_checkpoint_that_was_loaded_are_not_counted_as_trained(
    tmp_path: Path,
) -> None:
    attempt = {"started": "2026-11-01T00:00:00+00:00", "ended": "2026-11-01T00:00:10+00:00"}
    events = [event("start", step=0), event("resumed", step=1000), event("end", step=1010)]
    metrics = [scalar(i, "train/loss", 1.0) for i in range(1001, 1011)]
    run = write_run(tmp_path / "run", metrics, events, attempts=[attempt])
    assert make_report(run).facts["runs"][0]["steps_per_second"] is None


def test_facts_are_right_for_runs_that_are_not_usual(tmp_path: Path) -> None:
    attempt = {"started": "2026-11-01T00:00:00+00:00", "ended": "2026-11-01T00:00:10+00:00"}
    folder = write_run(
        tmp_path / "fork",
        [scalar(i, "train/loss", "NaN" if i == 120 else 0.5) for i in range(101, 121)],
        [
            event("start", step=100),
            event("end", step=120, status="error", error="ValueError: no", traceback="Traceback …"),
        ],
        status="error",
        attempts=[attempt],
        last_error="ValueError: no",
    )
    report = make_report(folder)
    (facts,) = report.facts["runs"]
    assert facts["steps_per_second"] == 2.0  # 20 steps: a fork does not begin at step 0
    assert facts["metrics"]["train/loss"]["last"] is None
    text = " ".join(describe_facts(facts))
    assert "The training loss ended at a value that is not finite" in text
    (failure,) = shown_data(report)["runs"][0]["failures"]
    assert (failure["hook"], failure["traceback"]) == ("training", "Traceback …")


# -- histograms, texts and images -----------------------------------------------------------------


def histogram(step: int, counts: Any, edges: Any) -> Record:
    return scalar(step, "h", {"counts": counts, "edges": edges}, kind="histogram")


def test_histograms_over_steps_have_common_edges(tmp_path: Path) -> None:
    media = Media()
    for step in range(1000):
        media.add(histogram(step, [1, 3], [step, step + 1, step + 2]))
    encoded, left_out = media.encode(tmp_path)
    shown = encoded["histograms"]["h"]
    assert left_out == []
    assert (shown["total"], shown["steps"][0], shown["steps"][-1]) == (1000, 0, 999)
    assert 30 <= len(shown["steps"]) <= 64
    assert (shown["edges"][0], shown["edges"][-1]) == (0, 1001)
    for column in shown["columns"]:
        assert sum(share or 0.0 for share in column) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("counts", "edges"),
    [
        ([], []),
        ([1], [0, "x"]),
        ([HUGE], [0, 1]),
        ([1], [1, 1]),
        ([1], [-1.7e308, 1.7e308]),
        ([-1], [0, 1]),
        ([1] * 2000, list(range(2001))),
        (["NaN"], [0, 1]),
        ([1, 2], [0, 1]),
    ],
)
def test_histograms_that_are_none_are_left_out(counts: Any, edges: Any, tmp_path: Path) -> None:
    media = Media()
    media.add(histogram(1, counts, edges))
    encoded, left_out = media.encode(tmp_path)
    assert encoded["histograms"] == {}
    assert "1 histograms without valid counts and edges" in left_out


def test_images_come_from_the_run_only_and_are_checked(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    folder = tmp_path / "run"
    folder.mkdir()
    good = save_image(torch.rand(3, 8, 8), folder / "media", 1, "good")["path"]
    secret.write_bytes((folder / good).read_bytes())
    (folder / "media" / "link.png").symlink_to(secret)
    os.mkfifo(folder / "media" / "fifo.png")
    (folder / "media" / "text.png").write_text("<svg onload=alert(1)>")
    header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header
    (folder / "media" / "bomb.png").write_bytes(bomb + struct.pack(">I", zlib.crc32(header)))
    names = ("link", "fifo", "text", "bomb", "gone")
    paths = [good, *(f"media/{name}.png" for name in names), "media/../../secret.png"]
    metrics = [scalar(1, path, {"path": path}, kind="image") for path in paths]
    report = make_report(write_run(folder, metrics))
    images = shown_data(report)["runs"][0]["media"]["images"]
    assert {name: len(one["items"]) for name, one in images.items()} == {
        good: 1,
        **{f"media/{name}.png": 0 for name in names},
    }
    left_out = "\n".join(report.facts["runs"][0]["left_out"])
    for reason in ("a symbolic link", "a FIFO", "not a PNG", "100,000 × 100,000"):
        assert reason in left_out
    shutil.rmtree(folder / "media")
    (folder / "media").symlink_to(tmp_path)
    report = make_report(folder)
    assert not any(
        one["items"] for one in shown_data(report)["runs"][0]["media"]["images"].values()
    )


def test_a_spike_names_what_changed_most_first() -> None:
    values = {
        "calm": [[1, 1.0], [2, 1.1], [3, 1.0], [10, 1.05]],
        "ratio": [[1, 1.0], [2, 1.1], [3, 1.0], [10, 2.0], [11, 50.0]],
        "broken": [[1, 1.0], [10, "NaN"]],
        "before only": [[1, 1.0]],
    }
    batches = [{"loader": "train", "batch_idx": 9, "indices": [7, 3]}]
    spike = encode_spike(
        {"step": 10, "loss": 9.0, "z": 8.123456, "batches": batches, "values": values}
    )
    assert spike["title"] == "Step 10: loss 9, robust z-score 8.123"
    assert ["Samples", "batch 9 of train: indices 7, 3"] in spike["rows"]
    assert spike["values"] == [
        ["broken", "1", "nan", "nan"],
        ["ratio", "1", "2", "50"],
        ["calm", "1", "1.05", "1.05"],
    ]


# -- reading and writing --------------------------------------------------------------------------


def test_a_run_that_is_being_written_can_be_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    stop = threading.Event()

    def write() -> None:
        with (folder / "metrics.jsonl").open("a", buffering=1000) as file:
            step = 0
            while not stop.is_set() and step < 500_000:
                file.write(json.dumps(scalar(step, "train/loss", 1.0)) + "\n")
                step += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            (facts,) = make_report(folder).facts["runs"]
            assert not any("cannot be read" in line for line in facts["left_out"])
    finally:
        stop.set()
        writer.join()


@pytest.fixture
def plain_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", LOSSES)


def test_only_regular_files_are_replaced(plain_run: Path, tmp_path: Path) -> None:
    report = make_report(plain_run)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path):
        with pytest.raises(hookline.RunError, match="not a regular file"):
            report.write(path)
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.touch()
    link.symlink_to(target)
    report.write(link)  # what the link leads to is written; the link stays
    assert link.is_symlink()
    assert target.stat().st_size > 1_000_000
    command = [sys.executable, "-m", "hookline", "report", str(plain_run), "-o", str(fifo)]
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "is not a regular file" in failed.stderr
