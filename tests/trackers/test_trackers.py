"""The record in each tracker of a run that crashed and was resumed, read with its own reader."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wandb_files import read_history, read_wandb_file

from hookline.runs.jsonl_reader import read_records
from hookline.runs.run import Run

pytestmark = pytest.mark.slow

ODD_SCALARS = {
    "odd/infinity": math.inf,
    "odd/integer": math.inf,
    "odd/*/stars*": 1.0,
    "odd/a@b": 2.0,
    "odd/a#b": 3.0,
    "odd/" + "n" * 300: 4.0,
    "odd/cuda:0 \u00e9": 5.0,
    "hookline_step": 6.0,
    "../up": 8.0,
}
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a run that was killed after step 14 and resumed from step 10."""
    root = tmp_path_factory.mktemp("tracked")
    (root / "log.txt").write_text(run_script("tracked_training.py", root))
    (run,) = (root / "runs").iterdir()
    return run


def run_script(name, root):
    """Run a script of the support folder with offline tools; return what it logged."""
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    settings |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    settings |= {"TRACKIO_DIR": str(root / "trackio")}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / name), str(root)],
        env={**os.environ, **settings},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def read(folder):
    """Return what the readers of MLflow and trackio have read."""
    return json.loads((folder.parents[1] / "read.json").read_text())


@pytest.fixture(scope="module")
def record(folder):
    return list(read_records(folder / "metrics.jsonl"))


def series(record, name):
    return [(r["step"], r["value"]) for r in record if r["name"] == name]


def test_tensorboard_has_the_record_and_nothing_twice(folder, record):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name in ("own/step", "train/loss", "train/loss_epoch"):
        read = [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)]
        assert series(record, name) == read
    (histogram,) = events.Histograms("own/weights")
    assert histogram.step == 10
    assert histogram.histogram_value.num == 10
    (image,) = events.Images("own/picture")
    assert (image.step, image.width, image.height) == (10, 5, 4)
    notes = events.Tensors("own/note/text_summary")  # this reader drops no text
    assert {(note.step, note.tensor_proto.string_val[0]) for note in notes} == {(10, b"hello")}
    manifests = events.Tensors("hookline/manifest/text_summary")
    assert folder.name.encode() in manifests[-1].tensor_proto.string_val[0]
    assert b"verysecret" not in b"".join(f.read_bytes() for f in (folder / "tensorboard").iterdir())
    assert "_hparams_/experiment" in events.PluginTagToContent("hparams")


def test_tensorboard_has_odd_values(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {name: events.Scalars(name)[0].value for name in ODD_SCALARS} == ODD_SCALARS
    assert math.isnan(events.Scalars("odd/nan")[0].value)
    texts = ("odd/complex", "odd/surrogate", "odd/shape")
    found = {name: events.Tensors(f"{name}/text_summary")[0].tensor_proto for name in texts}
    assert found["odd/complex"].string_val[0] == b"(1+2j)"
    assert found["odd/surrogate"].string_val[0] == b"a?b"
    assert events.Histograms("odd/empty")[0].histogram_value.num == 0


def test_wandb_has_odd_values(folder):
    found = {name: value for row in read_history(folder)[-20:] for name, value in row.items()}
    renamed = {"hookline_step": "hookline_step_"}
    expected = {renamed.get(name, name): value for name, value in ODD_SCALARS.items()}
    assert {name: found.get(name) for name in expected} == expected
    assert found["odd/complex"] == "(1+2j)"
    assert found["odd/surrogate"] == "a?b"


def test_mlflow_has_odd_values_with_the_names_that_it_allows(read):
    metrics = {name: history[-1][1] for name, history in read["mlflow"]["metrics"].items()}
    largest = sys.float_info.max  # MLflow has no infinities in SQLite
    assert metrics["odd/infinity"] == metrics["odd/integer"] == largest
    assert metrics["odd/_/stars_"] == 1.0
    same = {name: value for name, value in metrics.items() if name.startswith("odd/a_b")}
    assert sorted(same.values()) == [2.0, 3.0]
    assert metrics["odd/" + "n" * 246] == 4.0
    assert metrics["odd/cuda:0 \u00e9"] == 5.0
    assert metrics["__/up"] == 8.0
    params = read["mlflow"]["params"]
    assert params["long"] == "v" * 6000
    assert sorted(value for name, value in params.items() if name.startswith("x_y")) == ["1", "2"]


def test_trackio_has_odd_values(read):
    found = {name: value for row in read["trackio"]["rows"] for name, value in row.items()}
    assert {name: found.get(name) for name in ODD_SCALARS} == ODD_SCALARS
    assert read["trackio"]["config"]["own"] == 2


def test_a_value_that_cannot_be_logged_costs_no_other(folder):
    said = (folder.parents[1] / "log.txt").read_text()
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        assert f"the tracker '{name}' lacks 1 value." in said


def test_wandb_has_every_value_since_the_kill_and_what_it_had_written(folder, record):
    rows = read_history(folder)
    losses = [(row["hookline_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses[-10:] == series(record, "train/loss")[10:]
    (raised,) = (folder.parents[1] / "raised").iterdir()
    rows = read_history(raised)
    picture = [row for row in rows if "own/picture/path" in row][-1]
    assert picture["hookline_step"] == 10
    assert picture["own/note"] == "hello"
    assert sum(picture["own/weights/values"]) == 10


def test_after_an_exception_wandb_has_also_the_values_of_repeated_steps(folder):
    (raised,) = (folder.parents[1] / "raised").iterdir()
    rows = read_history(raised)
    losses = [(row["hookline_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    written = series(list(read_records(raised / "metrics.jsonl")), "train/loss")
    assert [step for step, _ in losses] == [*range(1, 14), *range(11, 21)]
    assert losses[:10] + losses[13:] == written


def test_a_hooks_own_wandb_log_loses_nothing(folder):
    (raised,) = (folder.parents[1] / "raised").iterdir()
    rows = read_history(raised)
    steps = [*range(1, 15), *range(11, 21)]
    assert [row["beside"] for row in rows if "beside" in row] == steps
    own = [row for row in rows if "beside_with_step" in row]
    assert [row["beside_with_step"] for row in own] == [2 * step for step in steps]
    assert [row["hookline_step"] for row in own] == steps


def test_wandb_has_hyperparameters_manifest_and_checkpoints(folder):
    records = [
        record
        for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        for record in read_wandb_file(file)
    ]
    assert {r.run.run_id for r in records if r.run.run_id} == {folder.name}
    config = {item.key: json.loads(item.value_json) for r in records for item in r.config.update}
    assert config["width"] == 4
    assert config["hookline"]["run_id"] == folder.name
    assert "verysecret" not in str(records)
    axes = {r.metric.name: r.metric.step_metric for r in records if r.metric.name}
    assert axes["train/loss"] == "hookline_step"
    aliases = [list(r.request.log_artifact.artifact.aliases) for r in records]
    aliases += [list(r.artifact.aliases) for r in records if r.artifact.name]
    assert any("step_000016" in names for names in aliases)
    assert list(folder.glob("wandb/offline-run-*/files/hookline_manifest.json"))


def test_mlflow_has_every_value_in_a_file_of_the_run(folder, record, read):
    run = read["mlflow"]
    assert (run["run_id"], run["status"]) == (run["ids"]["run_id"], "FINISHED")
    for name in ("train/loss", "own/step", "train/loss_epoch"):
        history = sorted(run["metrics"][name], key=lambda metric: metric[2])
        assert sorted({step: value for step, value, _ in history}.items()) == series(record, name)
    assert len(run["metrics"]["train/loss"]) == 23  # three steps were trained twice
    assert run["params"]["width"] == "4"
    assert run["tags"]["hookline.run_id"] == folder.name
    assert run["tags"]["hookline.tags"] == "first, second"
    assert run["tags"]["mlflow.runName"] == "tracked"
    assert "verysecret" not in str(run)
    assert run["note"] == "hello"
    image, size = run["image"]
    assert "own" in image
    assert "picture" in image
    assert size > 0
    listed = run["artifacts"]
    assert "text/own/note/step_000010.txt" in listed
    assert "histograms/own/weights/step_000010.json" in listed
    assert "hookline/manifest.json" in listed
    assert {"checkpoints/step_000010", "checkpoints/step_000016"} <= set(listed)


def test_trackio_has_every_value(folder, record, read):
    run = read["trackio"]
    assert run["name"] == folder.name
    assert run["config"]["width"] == 4
    assert "verysecret" not in str(run)
    rows = run["rows"]
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert sorted(dict(losses).items()) == series(record, "train/loss")
    media = [row for row in rows if "own/picture" in row][-1]
    assert media["step"] == 10
    assert media["own/note"]["_value"] == "hello"
    assert media["own/weights"]["_type"] == "trackio.histogram"


def test_ids_of_the_tools_runs_are_in_the_manifest(folder):
    trackers = Run.open(folder).manifest["trackers"]
    assert set(trackers) == {"tensorboard", "wandb", "mlflow", "trackio"}
    assert trackers["wandb"]["id"] == folder.name
