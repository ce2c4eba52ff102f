"""Reading runs: finished, running and damaged ones."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from loops import Net, batches, make, same, weights
from torch.nn import functional as F

import hookline
from hookline.errors import CheckpointError, RunError
from hookline.runs import OpenedRun, Run, open_run
from hookline.runs.jsonl_reader import JsonlReader, read_jsonl_backwards
from hookline.runs.location import find_run_of_checkpoint
from hookline.runs.metric_values import is_better_when_low

IMPORTED = time.monotonic()


class Saves(hookline.Hook):
    """Saves after each of these steps; may stop after the last."""

    critical = True

    def __init__(self, *steps: int, stop: bool = False) -> None:
        self.steps, self.stop = steps, stop

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step in self.steps:
            trainer.save_checkpoint()
            if self.stop and step == self.steps[-1]:
                trainer.stop("enough")


class Logs(hookline.Hook):
    def on_train_start(self, trainer: Any) -> None:
        trainer.log("note", "<b>hello</b>", kind="text")

    def on_step_end(self, trainer: Any, step: int) -> None:
        trainer.log("speed", math.nan if step == 2 else float(step))


def train(runs: Path, *hooks: hookline.Hook, resume_from: Any = None) -> hookline.Trainer:
    config = hookline.TrainerConfig(runs=runs, progress="off", seed=3, max_epochs=2)
    trainer = hookline.Trainer(config, *make(), loss_fn=F.mse_loss, hooks=hooks)
    return trainer.fit(batches(3), val_loaders=batches(2, seed=5), resume_from=resume_from)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> hookline.Trainer:
    return train(tmp_path_factory.mktemp("finished"), Saves(2, 6), Logs())


def copied(trainer: hookline.Trainer, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(trainer.run.path, folder / trainer.run.id))


def named(run: OpenedRun, *names: str, **options: Any) -> list[Any]:
    return [(row["step"], row["name"]) for row in run.metrics(*names, **options)]


# -- finding --------------------------------------------------------------------------------------


def test_a_run_is_opened_by_folder_by_id_and_by_part_of_its_id(
    finished: hookline.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(finished, tmp_path / "runs")
    other = tmp_path / "runs" / "19990101-000000-abcdef"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    for given in (path, str(path), path.name, path.name[:10], f"runs/{path.name[:12]}"):
        assert open_run(given).path.resolve() == path
    assert open_run("1999").path.resolve() == open_run("abcdef").path.resolve() == other
    monkeypatch.chdir(tmp_path.parent)
    assert open_run(path.name[:9], runs=tmp_path / "runs").id == finished.run.id


def test_what_is_no_run_is_an_error_that_names_the_nearest(
    finished: hookline.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"no run '1': runs contains no runs"):
        open_run("1")
    ids = ["20200101-000000-aaaaaa", "20200101-000000-bbbbbb"]
    for one in ids:
        Path("runs", one).mkdir(parents=True)
    several = f"matches 2 runs in runs: '{ids[1]}', '{ids[0]}'. Give more"
    with pytest.raises(RunError, match=several):
        open_run("2020")
    similar = f"no run '20200101-000000-aaaaax'.*Did you mean '{ids[0]}'"
    with pytest.raises(RunError, match=similar):
        open_run("20200101-000000-aaaaax")
    with pytest.raises(RunError, match=f"no run 'zzz' in runs. The newest are: '{ids[1]}'"):
        open_run("zzz")
    with pytest.raises(RunError, match=r"runs is not a run: .* newest first: '2020"):
        open_run("runs")
    Path("empty").mkdir()
    with pytest.raises(RunError, match=r"empty is not a run: it has neither a manifest.json nor"):
        open_run("empty")
    with pytest.raises(RunError, match="is not a run"):  # it has a manifest, but not of a run
        open_run(finished.run.checkpoints / "step_000002")


def test_a_renamed_folder_is_still_a_run(finished: hookline.Trainer, tmp_path: Path) -> None:
    path = copied(finished, tmp_path).rename(tmp_path / "my best one")
    assert open_run(path).id == finished.run.id
    for name in ("metrics.jsonl", "events.jsonl"):
        (path / name).unlink()
    assert open_run(path).id == finished.run.id


# -- a finished run -------------------------------------------------------------------------------


def test_it_tells_what_it_is(finished: hookline.Trainer) -> None:
    run = open_run(finished.run.path)
    assert run.manifest == json.loads((run.path / "manifest.json").read_text())
    assert (run.id, run.status, run.damage) == (finished.run.id, "completed", [])
    assert run.seconds is not None
    assert 0 < run.seconds <= time.monotonic() - IMPORTED


def test_rows_have_names_steps_and_numbers(finished: hookline.Trainer) -> None:
    run = open_run(finished.run.path)
    first = run.metrics("train/loss")[0]
    assert list(first) == ["step", "epoch", "time", "name", "kind", "value"]
    assert (first["step"], first["epoch"], first["kind"]) == (1, 0, "scalar")
    assert isinstance(first["value"], float)
    assert named(run, "val/*") == [(3, "val/loss"), (6, "val/loss")]
    assert named(run, "eval/loss") == named(run, "val/loss")
    assert {name for _, name in named(run, "val/*", "speed")} == {"val/loss", "speed"}
    assert named(run, "train/loss") == [(step, "train/loss") for step in range(1, 7)]
    assert named(run, "loss") == []
    assert [row["value"] for row in run.metrics(kind="text")] == ["<b>hello</b>"]
    assert math.isnan(run.metrics("speed")[1]["value"])
    assert len(named(run)) == 6 + 6 + 2 + 2 + 1


def test_rows_are_a_list_and_a_frame_is_asked_for(finished: hookline.Trainer) -> None:
    pandas = pytest.importorskip("pandas")
    run = open_run(finished.run.path)
    assert type(run.metrics("train/loss")) is list  # also where pandas is installed
    frame = run.frame("train/loss")
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["step", "epoch", "time", "name", "kind", "value"]
    assert list(frame["step"]) == [1, 2, 3, 4, 5, 6]
    assert frame["value"].dtype == float
    assert list(run.frame("nothing").columns) == list(frame.columns)
    assert list(run.frame(kind="text")["value"]) == ["<b>hello</b>"]


def test_the_run_of_a_checkpoint_is_its_enclosing_run_folder(
    finished: hookline.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = finished.run.path
    assert find_run_of_checkpoint(path / "checkpoints" / "step_000006") == path
    assert find_run_of_checkpoint(tmp_path / "a" / "step_000006") is None
    monkeypatch.chdir(path)  # a checkpoint that is named without its folder
    assert find_run_of_checkpoint(Path("mine")) is None


def test_events_are_there_and_can_be_chosen(finished: hookline.Trainer) -> None:
    run = open_run(finished.run.path)
    assert [e["kind"] for e in run.events()] == ["start", "checkpoint", "checkpoint", "end"]
    assert [e["step"] for e in run.events("checkpoint")] == [2, 6]
    assert [e["kind"] for e in run.events("end", "start")] == ["start", "end"]


def test_results_are_those_of_the_rows_whatever_lines_are_between_them(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    values = [0.5, -3, 1e-7, 2e20, math.nan, math.inf, -math.inf, 10**30, True]
    names = ["train/loss", 'a "quoted"\\name', "größe", "x"]
    for step in range(300):
        for i, name in enumerate(names):
            run.log(step, None if step % 2 else 0, name, values[(step + i) % len(values)])
        if step % 100 == 50:
            run.log(step, 0, "x", "a\rb", kind="text")
            run.log(cast(int, None), 0, "x", 7.5)
            run.log(step, 0, "x", object())
    run.close()
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"v": 1, "st{"v": 1, "step": 3, "epoch": 0}\nbroken\n')
        file.write(b'{"value": 8.25, "v": 1, "step": 900, "name": "x", "kind": "scalar"}\n')
        file.write(b'{"v": 7, "step": 901, "name": "x", "kind": "scalar", "value": -99}\n')
    opened = open_run(run.path)
    results = opened.results()
    for name, result in results.items():
        rows = [row for row in opened.metrics(kind="scalar") if row["name"] == name]
        finite = [float(row["value"]) for row in rows if math.isfinite(row["value"])]
        assert (result.count, result.last_step) == (len(rows), rows[-1]["step"])
        assert (result.lowest, result.highest) == (min(finite), max(finite))
        first = next(row for row in rows if row["value"] == result.lowest)
        assert result.lowest_step == first["step"]
    assert list(results) == names
    assert (results["x"].last, results["x"].last_step) == (8.25, 900)
    assert results["x"].count == 300 + 3 + 1
    lines = 300 * 4 + 9
    assert opened.damage == [
        f"metrics.jsonl: 2 lines cannot be read (line {lines + 1}: Expecting ':' delimiter (column "
        f"15); line {lines + 2}: Expecting value (column 1))",
        "metrics.jsonl: records of version 7 were skipped; this hookline reads up to 1. Install a "
        "newer one: pip install -U hookline",
    ]


def usual(step: int, name: str, value: str = "0.5", epoch: str = "0") -> bytes:
    head = f'{{"v": 1, "step": {step}, "epoch": {epoch}, "time": 1.5, "name": "{name}", '
    return f'{head}"kind": "scalar", "value": {value}}}'.encode()


ODD_LINES = [
    *(usual(1, "lr"), usual(2, "lr", "3"), usual(3, "lr", "-2e-05"), usual(4, "lr", "-0")),
    *(usual(5, "lr", '"NaN"'), usual(6, "lr", '"-Infinity"', "null"), usual(7, "lr/a")),
    *(usual(8, "val/loss"), usual(9, "größe"), usual(10, "l[r]"), usual(11, "x" * 2000)),
    b'{"v": 1, "step": 12, "time": 1.5, "name": "l\\u0072", "kind": "scalar", "value": 1}',
    b'{"name":"lr","v":1,"step":13,"kind":"scalar","value":2.5,"more":[{}]}',
    b'{"v": 1, "step": 14, "name": "other", "kind": "scalar", "value": 1, "name" : "lr"}',
    b'{"v": 1, "step": 15, "name": "note", "kind": "text", "value": "the \\"lr\\" and "lr"}',
    b'{"v": 1, "step": 16, "name": "note", "kind": "text", "value": "lr"}',
    b'{"v": 1, "step": 17, "name": "lr", "kind": "text", "value": "x", "was": "scalar"}',
    b'{"v": 9, "step": 18, "name": "lr", "kind": "scalar", "value": 1}',
    b'{"v": 1, "step": 19, "name": "val\\/loss", "kind": "scalar", "value": 1}',
    b'{"v": 1, "step": 20, "name": "gr\\u00f6\\u00dfe", "kind": "scalar", "value": 1}',
    *(b"", b'"lr"', b'{"name": "lr"', b"\xff" + usual(21, "lr"), usual(22, "lr") + b"\r"),
    usual(23, "l?").replace(b"?", b"\xff"),
]
"""Lines as the metrics log writes them, as others may write them, and damaged ones."""


@pytest.mark.parametrize(
    "names",
    [
        *((), ("lr",), ("lr/a",), ("absent",), ("größe",), ("l?",), ("l*",), ("*r",)),
        *(("eval/loss",), ("val/*",), ("l[[]r]",), ("lr", "note"), ("note",), ("x" * 2000,)),
        *(('"',), ("\\",), ("",), ("lr", "[vx]*")),
    ],
)
def test_some_series_have_the_rows_that_they_have_among_all(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    between = b"\n".join(usual(step, "lr") for step in range(2500))  # more than a block
    separate = [line for odd in ODD_LINES for line in (odd, between)]
    for lines in [ODD_LINES, separate] if names in [("lr",), ("l*",), ("note",)] else [ODD_LINES]:
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n" + usual(99, "lr"))
        expected = [
            {name: record.get(name) for name in ("step", "epoch", "time", "name", "kind", "value")}
            | ({"was": record["was"]} if "was" in record else {})
            for record in JsonlReader(tmp_path / "metrics.jsonl", growing=True)
            if not names
            or any(fnmatchcase(record["name"], name.replace("eval/", "val/")) for name in names)
        ]
        for row in expected:
            if row["kind"] == "scalar" and isinstance(row["value"], str):
                row["value"] = float(row["value"])
        found = OpenedRun(tmp_path).metrics(*names)
        assert list(map(repr, found)) == list(map(repr, expected))  # NaN, and 1 is not 1.0
        assert bool(found) is (names not in [("absent",), ('"',), ("\\",), ("",)])


def test_a_long_run_is_shown_without_keeping_its_values(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    for step in range(40_000):
        run.log(step, 0, "train/loss", 1 / (step + 1))
    run.close()
    opened = open_run(run.path)
    str(opened)
    tracemalloc.start()
    try:
        assert "40000" in str(opened)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = (run.path / "metrics.jsonl").stat().st_size
    assert size > 4 * 2**20
    assert peak < 3 * 2**20


def test_results_have_the_last_and_the_best_value(tmp_path: Path) -> None:
    writes = Run.create(tmp_path, config={}, seed=0, hooks=[])
    for step, (loss, accuracy) in enumerate([(3, 0.1), (1, 0.9), (2, 0.5), (math.nan, math.inf)]):
        writes.log_metrics(step, 0, {"val/loss": loss, "val/accuracy": accuracy, "x": loss})
    writes.log(4, 0, "x", "text", kind="text")
    writes.close()
    results = open_run(writes.path).results()
    loss, accuracy, x = (results[name] for name in ("val/loss", "val/accuracy", "x"))
    assert (loss.best, loss.best_step, loss.count, loss.last_step) == (1, 1, 4, 3)
    assert math.isnan(loss.last)
    assert (accuracy.best, accuracy.best_step, accuracy.last) == (0.9, 1, math.inf)
    assert (x.best, x.lowest, x.highest, x.count) == (None, 1, 3, 4)


@pytest.mark.parametrize(
    ("name", "low"),
    [
        ("val/loss", True),
        ("train/loss_epoch", True),
        ("val/dl_books/perplexity", True),
        ("val/accuracy", False),
        ("val/top5", False),
        ("lr/group0", None),
        ("glossary", None),
        ("loss/accuracy", None),
    ],
)
def test_the_name_tells_whether_low_is_better(name: str, low: bool | None) -> None:
    assert is_better_when_low(name) is low


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_are_listed_and_their_weights_load(finished: hookline.Trainer) -> None:
    first, last = open_run(finished.run.path).checkpoints()
    assert (first.step, first.epoch, first.is_last, first.metrics) == (2, 0, False, {})
    assert (last.step, last.epoch, last.is_last, last.is_best) == (6, 1, True, False)
    assert last.path == finished.run.checkpoints / "step_000006"
    model, _ = make(seed=9)
    assert last.load_into(model) is model
    assert same(weights(model), weights(finished.model))
    first.load_into(model)
    assert not same(weights(model), weights(finished.model))


def test_a_checkpoint_tells_its_metrics_also_what_is_not_finite(tmp_path: Path) -> None:
    from hookline.checkpoint import save_checkpoint, set_pointer

    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    metrics = {"val/loss": math.nan, "val/accuracy": 0.5, "x": -math.inf}
    info = {"step": 4, "epoch": 1, "metrics": metrics}
    saved = save_checkpoint(
        run.checkpoints / "best_one", model=Net().state_dict(), state={}, info=info
    )
    set_pointer(run.checkpoints, "best", saved)
    run.close()
    (found,) = open_run(run.path).checkpoints()
    assert (found.is_best, found.is_last) == (True, False)
    assert math.isnan(found.metrics.pop("val/loss"))
    assert found.metrics == {"val/accuracy": 0.5, "x": -math.inf}


class Wider(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 32)
        self.third = torch.nn.Linear(16, 4)


def test_a_model_that_does_not_fit_is_told_everything_and_left_alone(
    finished: hookline.Trainer,
) -> None:
    model = Wider()
    before = weights(model)
    with pytest.raises(CheckpointError) as raised:
        open_run(finished.run.path).checkpoints()[-1].load_into(model)
    text = str(raised.value)
    assert "step_000006 does not match this Wider, which was not changed" in text
    assert "the checkpoint lacks 'third.weight', 'third.bias'" in text
    assert "the model lacks 'second.bias', 'second.weight'" in text
    assert "'first.weight' is (16, 8) in the checkpoint and (32, 8) here" in text
    assert same(weights(model), before)


def test_the_names_of_a_compiled_or_wrapped_model_fit(finished: hookline.Trainer) -> None:
    checkpoint = open_run(finished.run.path).checkpoints()[-1]
    model, _ = make(seed=9)
    checkpoint.load_into(torch.compile(model))  # type: ignore[type-var]
    assert same(weights(model), weights(finished.model))


def test_a_damaged_checkpoint_is_named_and_the_others_are_there(
    finished: hookline.Trainer, tmp_path: Path
) -> None:
    path = copied(finished, tmp_path)
    file = path / "checkpoints" / "step_000006" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    run = open_run(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
        run.checkpoints()[-1].load_into(Net())
    file.write_bytes(data[:-1])
    assert [one.step for one in run.checkpoints()] == [2]
    assert run.damage == [
        f"checkpoints/step_000006: model.safetensors has {len(data) - 1} bytes "
        f"instead of {len(data)}"
    ]
    file.unlink()
    assert run.damage == ["checkpoints/step_000006: model.safetensors is missing"]
    (file.parent / "manifest.json").write_text("{")
    assert "step_000006: manifest.json cannot be read" in run.damage[0]
    (file.parent / "manifest.json").write_text("[]")
    assert "step_000006: manifest.json is not the manifest of a checkpoint" in run.damage[0]
    (file.parent / "manifest.json").unlink()
    assert run.damage == ["checkpoints/step_000006: manifest.json is missing"]
    (path / "checkpoints" / ".tmp-step_000007-1").mkdir()  # being written
    assert len(run.damage) == 1


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "damage"),
    [
        (None, "manifest.json is missing"),
        ('{"format": "hookline.run", "ver', "cannot be read"),
        ("[]", "is not the manifest of a run"),
        ('{"format": "hookline.run", "version": 99}', "Install a newer hookline"),
    ],
)
def test_without_its_manifest_a_run_still_gives_the_rest(
    finished: hookline.Trainer, tmp_path: Path, text: str | None, damage: str
) -> None:
    path = copied(finished, tmp_path)
    (path / "manifest.json").unlink()
    if text is not None:
        (path / "manifest.json").write_text(text)
    run = open_run(path)
    assert (run.manifest, run.id, run.status, run.seconds) == ({}, path.name, "unknown", None)
    (found,) = run.damage
    assert damage in found
    assert len(named(run, "train/loss")) == 6
    assert len(run.checkpoints()) == 2
    assert "unknown, 6 steps" in repr(run)
    assert damage in str(run)
    assert "damaged" in run._repr_html_()


def test_torn_lines_are_counted_and_left_out(finished: hookline.Trainer, tmp_path: Path) -> None:
    path = copied(finished, tmp_path)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"v": 1, "st\n[1]\n{"v": 2, "step": 1, "name": "train/loss"}\n{"v": 1, "na')
    (path / "events.jsonl").unlink()
    run = open_run(path)
    lines = len((finished.run.path / "metrics.jsonl").read_bytes().splitlines())
    assert run.damage == [
        "metrics.jsonl: its last line is incomplete",
        f"metrics.jsonl: 2 lines cannot be read (line {lines + 1}: Unterminated string starting at "
        f"(column 10); line {lines + 2}: it is not an object)",
        "metrics.jsonl: records of version 2 were skipped; this hookline reads up to 1. "
        "Install a newer one: pip install -U hookline",
        "events.jsonl is missing",
    ]
    assert len(named(run, "train/loss")) == 6
    assert run.events() == []


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    writes = Run.create(tmp_path, config={}, seed=0, hooks=[])
    writes.log(1, 0, "x", 1.0)
    writes.flush()
    for name in ("metrics.jsonl", "events.jsonl"):
        with (writes.path / name).open("ab") as file:
            file.write(b'{"v": 1, "st')
    run = open_run(writes.path)
    assert (run.status, run.damage, named(run)) == ("training", [], [(1, "x")])
    writes.close()
    assert len(run.damage) == 2


# -- a run that goes on, or went on ---------------------------------------------------------------


ENDLESS = """
import sys, itertools, torch, hookline
from loops import make, batches
config = hookline.TrainerConfig(runs=sys.argv[1], progress="off", max_epochs=None,
                                checkpoints={"background": False})
class Tells(hookline.Hook):
    def on_step_end(self, trainer, step):
        if step == 20: trainer.save_checkpoint()
        if step % 50 == 0:
            trainer.run.flush()
            print(step, flush=True)
trainer = hookline.Trainer(config, *make(), loss_fn=torch.nn.functional.mse_loss, hooks=[Tells()])
trainer.fit(batches(10))
"""


def test_a_killed_training_is_lost_and_everything_it_wrote_is_there(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1] / "support"
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tests)},
        text=True,
    ) as training:
        assert training.stdout is not None
        while "100" not in training.stdout.readline():
            assert training.poll() is None
        (path,) = tmp_path.iterdir()
        assert open_run(path).status == "training"
        training.send_signal(signal.SIGKILL)
        end = time.monotonic() + 120
        while open_run(path).status == "training":  # a zombie until somebody waits for it
            assert time.monotonic() < end
            time.sleep(0.01)
    run = open_run(path)
    assert (run.status, run.damage) == ("lost", [])
    steps = [row["step"] for row in run.metrics("train/loss")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 99
    assert run.seconds is not None
    assert 0 < run.seconds <= time.monotonic() - started
    (checkpoint,) = run.checkpoints()
    checkpoint.load_into(Net())
    assert run.manifest["status"] == "training"


def test_whether_a_process_of_elsewhere_lives_is_not_guessed(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    part = run.manifest["attempts"][0]

    def status(**changed: Any) -> str:
        run.update(attempts=[{**part, **changed}])
        return open_run(run.path).status

    assert status() == "training"
    assert status(pid=2**22 + 1) == "lost"
    assert status(pid=2**22 + 1, host="elsewhere") == "training"
    assert status(pid=2**22 + 1, pid_namespace="pid:[1]") == "training"
    assert status(pid_started=1) == "lost"  # another process has got the number
    assert status(pid=None) == "training"


def test_steps_that_were_trained_again_count_once(tmp_path: Path) -> None:
    first = train(tmp_path, Saves(2), Logs())
    train(tmp_path, Saves(2), Logs(), resume_from=first.run.checkpoints / "step_000002")
    run = open_run(first.run.path)
    assert [step for step, _ in named(run, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert len(named(run, "train/loss", repeated=True)) == 10
    assert run.results()["train/loss"].count == 6
    assert run.overview()["attempts"] == 2
    assert "in 2 attempts" in str(run)
    times = [row["time"] for row in run.metrics("train/loss")]
    (_, again) = run.events("start")
    assert [when > again["time"] for when in times] == [False, False, True, True, True, True]


def test_records_are_read_from_the_end_across_blocks(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    for step in range(4000):
        run.log(step, 0, "x" if step else "first/é" * 20_000, float(step))
    run.close()
    file = run.path / "metrics.jsonl"
    assert [record["step"] for record in read_jsonl_backwards(file)] == list(range(3999, -1, -1))
    some = [record["step"] for record in read_jsonl_backwards(file, max_bytes=70_000)]
    assert 500 < len(some) < 3000
    assert list(read_jsonl_backwards(tmp_path / "none")) == []


# -- showing itself -------------------------------------------------------------------------------


def test_it_shows_itself_as_text(finished: hookline.Trainer) -> None:
    run = open_run(finished.run.path)
    assert repr(run) == f"<run {run.id}: completed, 6 steps, {run.path}>"
    text = str(run)
    for word in (run.id, "completed", "saves, logs", "seed        3", "6 steps", "torch 2."):
        assert word in text
    assert run.manifest["config_hash"][:12] in text
    lines = [line.split() for line in text.splitlines()]
    best = run.results()["val/loss"]
    assert ["val/loss", f"{best.last:.6g}", f"{best.best:.6g}", str(best.best_step), "2"] in lines
    assert lines[-1][:4] == ["step_000006", "6", "1", "last"]


def test_attempts_of_an_older_run_are_read_as_parts_and_written_as_attempts(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    run.close("interrupted")
    file = run.path / "manifest.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "parts": written.pop("attempts")}))
    assert open_run(run.path).overview()["attempts"] == 1
    Run.open(run.path, resume=True).close()
    written = json.loads(file.read_text())
    assert "parts" not in written
    assert [one["status"] for one in written["attempts"]] == ["interrupted", "completed"]
