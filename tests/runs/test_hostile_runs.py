"""Run folders of strangers: nothing outside is read or written, and one breaks no other."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hostile_runs import ATTACKS, MARKER, Place, metric, rewind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loops import batches, make
from torch.nn import functional as F
from typer.main import get_command

import hookline
from hookline.cli.app import app
from hookline.errors import HooklineError, RunError
from hookline.files import file_limits, parse_json
from hookline.runs import Run, diff_runs, open_run, read_records
from hookline.runs.environment import describe_process, is_process_alive
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_reader import JsonlReader
from hookline.runs.location import find_run, find_run_of_checkpoint, list_run_folders
from hookline.runs.restart import find_unfinished_run

SECONDS = 300  # whatever waits for ever fails
COMMAND = get_command(app)
GOOD, HOSTILE = "20200101-000000-aaaaaa", "20210101-000000-bbbbbb"


class Saves(hookline.Hook):
    critical = True

    def on_train_end(self, trainer: Any) -> None:
        trainer.save_checkpoint()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint, an image and a histogram, that was interrupted."""
    root = tmp_path_factory.mktemp("template")
    config = hookline.TrainerConfig(runs=root, progress="off", seed=3)
    trainer = hookline.Trainer(config, *make(), loss_fn=F.mse_loss, hooks=[Saves()])
    trainer.fit(batches(3), val_loaders=batches(2, seed=5))
    with_media = Run.open(trainer.run.path, resume=True)
    with_media.log(4, 1, "picture", torch.zeros(2, 2), kind="image")
    with_media.log(4, 1, "weights", torch.zeros(3), kind="histogram")
    with_media.close("interrupted")
    # One part, as `Place.change_part` expects.
    file = trainer.run.path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    file.write_text(json.dumps({**manifest, "attempts": manifest["attempts"][1:]}))
    return trainer.run.path


@pytest.fixture
def place(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A good run, a newer one to be attacked, and files with a marker outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_limits, "manifest_bytes", 1 << 23)
    monkeypatch.setattr(file_limits, "line_bytes", 1 << 21)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=make_frame))
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    place = Place(runs, runs / GOOD, runs / HOSTILE, outside)
    for folder in (place.good, place.run):
        shutil.copytree(template, folder)
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest["run_id"] = folder.name
        (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.copytree(template, outside)
    manifest = json.loads((outside / "manifest.json").read_bytes())
    (outside / "manifest.json").write_text(json.dumps({**manifest, "name": MARKER}))
    for name in ("metrics.jsonl", "events.jsonl", "repeated.jsonl", "log.jsonl"):
        record = metric(name=MARKER, kind="text", value=MARKER)
        (outside / name).write_text(json.dumps(record) + "\n")
    (outside / "writer.lock").write_text(MARKER)
    (outside / "profile").mkdir()
    (outside / "checkpoints" / "step_000003").rename(outside / "checkpoints" / MARKER)
    return place


def make_frame(rows: list[Any], columns: Any) -> list[Any]:
    return [rows, columns]


@contextmanager
def time_limit() -> Generator[None]:
    def end(*_: Any) -> None:
        raise AssertionError(f"it took more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def snapshot(folder: Path) -> dict[str, Any]:
    """Return the names, kinds and contents of everything in a folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        kind = path.lstat().st_mode
        is_small = not path.is_symlink() and path.is_file() and path.stat().st_size < 1 << 24
        found[name] = (kind, path.read_bytes() if is_small else None)
    return found


def command(*arguments: str | Path) -> str:
    """Run `hookline runs` in this process; return what it prints."""
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            COMMAND.main(["runs", *map(str, arguments)], "hookline", standalone_mode=False)
        except HooklineError as error:
            print(error)
    return printed.getvalue()


def readers(place: Place, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return everything that reads a run."""
    good, run = open_run(place.good), open_run(folder)
    return {
        **{
            name: lambda name=name: getattr(run, name)
            for name in ("id", "manifest", "status", "damage", "seconds")
        },
        "metrics": run.metrics,
        "metrics by name": lambda: run.metrics("train/*", "eval/loss", kind="scalar"),
        "repeated metrics": lambda: run.metrics(repeated=True),
        "frame": lambda: run.frame(repeated=True),
        "events": run.events,
        "end events": lambda: run.events("end", "start"),
        "checkpoints": run.checkpoints,
        "results": run.results,
        "overview": run.overview,
        "repr": lambda: repr(run),
        "str": lambda: str(run),
        "html": run._repr_html_,
        "diff": lambda: (diff_runs(run, good), diff_runs(good, run)),
        "records": lambda: [
            list(read_records(folder / name)) for name in ("metrics.jsonl", "events.jsonl")
        ],
        "open": lambda: (opened := Run.open(folder), opened.id),
        "find": lambda: find_run(folder.name[:9], place.runs),
        "find by long id": lambda: find_run("x" * 10_000, place.runs),
        "list": lambda: list_run_folders(place.runs),
        "run of checkpoint": lambda: find_run_of_checkpoint(folder / "checkpoints" / "step_000003"),
        "config": lambda: find_unfinished_run(place.runs, {"config": {"seed": 0}, "hooks": []}),
    }


def read_all(place: Place, folder: Path) -> str:
    """Call everything that reads a run; return all that it gave, as text."""
    texts: list[str] = []
    for name, read in readers(place, folder).items():
        try:
            texts.append(str(read()))
        except HooklineError as error:
            texts.append(str(error))
        except FileNotFoundError:
            assert name == "records"
    return "\n".join(texts)


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.soak(every=5)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_run_is_named_and_breaks_no_other(name: str, place: Place) -> None:
    attack, expected = ATTACKS[name]
    attack(place)
    (folder,) = (path for path in place.runs.iterdir() if path != place.good)
    outside, inside = snapshot(place.outside), snapshot(folder)
    with time_limit():
        given = read_all(place, folder)
        damage = "\n".join(open_run(folder).damage)
        assert re.search(expected, damage)
        assert bool(damage) == bool(expected)
        given += command("show", folder) + command("diff", place.good, folder)
        json.loads(command("show", folder, "--json"))
        json.loads(command("diff", folder, place.good, "--json"))
    assert MARKER not in given
    assert (snapshot(place.outside), snapshot(folder)) == (outside, inside)


def test_all_hostile_runs_in_one_folder_hide_no_good_one(place: Place, template: Path) -> None:
    for number, (attack, _) in enumerate(ATTACKS.values()):
        shutil.copytree(template, folder := place.runs / f"20220101-000000-{number:06x}")
        attack(place._replace(run=folder))
    outside = snapshot(place.outside)
    with time_limit():
        listed = command("--runs", place.runs)
        assert listed.count("damaged: ") == 20
        assert re.search(r"and \d+ more damaged runs", listed)
        assert re.search(rf"^{GOOD} .* interrupted ", listed, re.MULTILINE)
        runs = json.loads(command("--runs", place.runs, "--json"))
        assert len(runs) == len(ATTACKS) + 2
        assert {"id": GOOD, "steps": 4, "damage": []}.items() <= runs[-1].items()
        assert find_run(GOOD[:8], place.runs) == place.good
        shutil.rmtree(place.run)
        checkpoint, _ = find_unfinished_run(place.runs, {"run_id": GOOD})
        assert checkpoint == place.good / "checkpoints" / "step_000003"
        found = hookline.get_last_checkpoint(place.runs, verify=False)
        assert found is not None
        assert found.resolve().is_relative_to(place.runs)
    assert MARKER not in listed + str(runs)
    assert snapshot(place.outside) == outside


def test_a_manifest_that_is_damaged_is_named_in_the_list(place: Place) -> None:
    place.change(run_id="../../outside", status=["x"])
    listed = command("--runs", place.runs)
    assert f"damaged: {place.run}: manifest.json: 'run_id' is '../../outside'" in listed
    both = json.loads(command("--runs", place.runs, "--json"))
    assert [(one["id"], len(one["damage"])) for one in both] == [(HOSTILE, 2), (GOOD, 0)]


# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.soak(every=5)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_run_is_resumed_or_refused_and_nothing_outside_is_written(
    name: str, place: Place
) -> None:
    attack, expected = ATTACKS[name]
    attack(place)
    (folder,) = (path for path in place.runs.iterdir() if path != place.good)
    outside, inside = snapshot(place.outside), snapshot(folder)
    with time_limit():
        try:
            run = Run.open(folder, resume=True)
        except RunError:
            assert snapshot(folder) == inside
        else:
            assert " is a " not in expected  # such as "media is a symbolic link"
            run.log(9, 0, "x", 1.0)
            run.log(9, 0, "picture", torch.zeros(2, 2), kind="image")
            with suppress(RunError):
                run.rewind({"step": 2})
            run.event("note")
            run.close()
            assert open_run(folder).status == "completed"
    assert snapshot(place.outside) == outside


@pytest.mark.parametrize(
    "fields",
    [
        {"end": 10**15},
        {"end": 2**62, "metrics": 2**61},
        {"repeated": 10**15},
        {"restored": [[0, 10**15]]},
        {"restored": [[0, 5]] * 1000},
    ],
)
def test_a_rewind_that_cannot_be_finished_neither_fills_the_disk_nor_hangs(
    place: Place, fields: dict[str, Any]
) -> None:
    place.change(**rewind(**fields))
    size = (place.run / "metrics.jsonl").stat().st_size
    with time_limit(), suppress(RunError):
        Run.open(place.run, resume=True).close()
    files = [place.run / name for name in ("metrics.jsonl", "repeated.jsonl")]
    total = sum(file.stat().st_size for file in files if file.exists())
    assert total <= 2 * size + 1


@pytest.mark.parametrize(
    "position",
    [
        *({}, {"metrics": -1}, {"metrics": "x"}, {"step": None}, {"metrics": 0, "rewinds": -1}),
        *({"metrics": [1]}, {"metrics": 1.5}, {"metrics": True}, {"step": {}}, {"other": 5}),
    ],
)
def test_a_position_that_is_not_valid_is_an_error(place: Place, position: Any) -> None:
    run = Run.open(place.run, resume=True)
    before = (place.run / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match="cannot continue at"):
        run.rewind(position)
    run.close()
    assert (place.run / "metrics.jsonl").read_bytes() == before


def test_a_rewind_that_is_refused_creates_no_file(place: Place) -> None:
    rewind = {"metrics": 0, "end": 10**15, "repeated": 0, "restored": [[0, 10**15]]}
    manifest = json.loads((place.run / "manifest.json").read_text())
    (place.run / "manifest.json").write_text(json.dumps({**manifest, "rewinds": [rewind]}))
    before = {name: data for name, data in snapshot(place.run).items() if name != "writer.lock"}
    with pytest.raises(RunError, match=r"repeated\.jsonl has 0 bytes"):
        Run.open(place.run, resume=True)
    after = {name: data for name, data in snapshot(place.run).items() if name != "writer.lock"}
    assert after == before


@pytest.mark.parametrize("line", [b"\n", b"x\n", b"{}\n"])
def test_a_log_of_damaged_lines_is_not_read_to_its_end(place: Place, line: bytes) -> None:
    with (place.run / "metrics.jsonl").open("ab") as file:
        file.write(line * 2_000_000)
    with time_limit():
        run = open_run(place.run)
        assert "too many are damaged" in " ".join(run.damage)
        assert run.metrics()
        assert run.overview()["status"]


def test_a_value_within_itself_is_converted_once() -> None:
    twice: list[Any] = [1]
    twice += [twice, {"inner": twice}]
    with time_limit():
        assert to_jsonable(twice) == [1, "…", {"inner": "…"}]
    shared = [1]
    assert to_jsonable([shared, shared]) == [[1], [1]]


def test_images_are_not_written_through_links(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    run, outside = Run.create(place.runs, config={}, seed=0, hooks=[]), snapshot(place.outside)
    (run.path / "media").symlink_to(place.outside)
    run.log(1, 0, "a", torch.zeros(2, 2), kind="image")
    assert "media is a symbolic link; expected a folder" in caplog.text
    (run.path / "media").unlink()
    (run.path / "media").mkdir()
    (run.path / "media" / "b-1.png").symlink_to(place.outside / "new.png")
    run.log(1, 0, "b", torch.zeros(2, 2), kind="image")
    run.log(1, 0, "../con.", torch.zeros(2, 2), kind="image")
    run.close()
    assert snapshot(place.outside) == outside
    paths = [row["value"]["path"] for row in open_run(run.path).metrics(kind="image")]
    assert paths == ["media/b-1-2.png", "media/_..-con.-1.png"]
    assert all((run.path / path).is_file() for path in paths)


def test_numbers_of_processes_in_files_are_checked_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: asked.append(pid))
    here = describe_process()
    for pid in (0, -1, -(2**31), 2**31, 2**63, 10**400, True, None, "1", 1.0, [1]):
        assert is_process_alive({**here, "pid": pid}) is None
    assert asked == []
    assert is_process_alive(here) is True


def test_a_run_folder_and_the_folder_of_runs_may_be_links(place: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(place.runs)
    assert open_run(GOOD, runs=tmp_path / "elsewhere").damage == []
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / GOOD).symlink_to(place.good)
    assert [path.name for path in list_run_folders(tmp_path / "more")] == [GOOD]
    Run.open(tmp_path / "more" / GOOD, resume=True).close()
    assert open_run(place.good).status == "completed"


def test_a_log_file_that_the_user_named_may_be_a_link(place: Place, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to(place.outside / "named.jsonl")
    hook = hookline.JSONLogHook(path=tmp_path / "log.jsonl")
    hook.on_train_start(SimpleNamespace(run=None), epoch=0, step=0)
    assert "train_start" in (place.outside / "named.jsonl").read_text()
    run = Run.create(place.runs, config={}, seed=0, hooks=[])
    (run.path / "log.jsonl").symlink_to(place.outside / "other.jsonl")
    with pytest.raises(OSError, match=r"log\.jsonl is a symbolic link"):
        hookline.JSONLogHook().on_train_start(SimpleNamespace(run=run), epoch=0, step=0)
    assert not (place.outside / "other.jsonl").exists()
    run.close()


def test_a_log_that_is_cut_while_it_is_read_is_read_up_to_there(place: Place) -> None:
    place.append("metrics.jsonl", *(metric(step=step) for step in range(10_000)))
    rows = iter(JsonlReader(place.run / "metrics.jsonl"))
    assert next(rows)["step"] == 1
    os.truncate(place.run / "metrics.jsonl", 100)
    assert 1000 < len(list(rows)) < 10_000


def test_a_folder_with_another_name_than_its_run_id_is_a_run(place: Place) -> None:
    renamed = place.run.rename(place.runs / "my run")
    run = open_run(renamed)
    assert (run.id, run.path.name, run.damage) == (HOSTILE, "my run", [])
    assert find_run("my run", place.runs) == renamed


def test_the_limits_are_settings(place: Place) -> None:
    assert hookline.file_limits is file_limits
    file_limits.manifest_bytes = 10  # the fixture resets it
    damage = open_run(place.run).damage
    assert len(damage) == 2  # of the run, and of its checkpoint
    for line in damage:
        assert "has more than 10 bytes; hookline.file_limits allows more" in line
    file_limits.line_bytes = 100
    with pytest.raises(RunError, match="the next line has more than 100 bytes"):
        list(read_records(place.run / "metrics.jsonl"))


# -- any value, any bytes -------------------------------------------------------------------------

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(10**400)
TEXTS = st.text(max_size=8) | st.sampled_from(["2026-11-15", "training", "../..", "\x1b[2J", "NaN"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
FILES = ("manifest.json", "metrics.jsonl", "events.jsonl")
fuzzed = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def paths_in(value: Any, depth: int = 3) -> list[list[Any]]:
    """Return where a JSON value can be changed: the keys and indices that lead there."""
    if not depth or not isinstance(value, dict | list):
        return []
    items = list(value.items() if isinstance(value, dict) else enumerate(value))[:40]
    return [
        path
        for key, inner in items
        for path in ([key], *([key, *more] for more in paths_in(inner, depth - 1)))
    ]


def read_changed(place: Place, file: str, data: bytes) -> None:
    """Read the hostile run with other contents of one file."""
    before = (place.run / file).read_bytes()
    (place.run / file).write_bytes(data)
    try:
        with time_limit():
            read_all(place, place.run)
            command("show", place.run, "--json")
            assert GOOD in command("--runs", place.runs)
    finally:
        (place.run / file).write_bytes(before)


@fuzzed
@given(data=st.data(), value=VALUES)
def test_any_value_in_a_manifest_is_shown_or_named(place: Place, data: Any, value: Any) -> None:
    manifest = json.loads((place.run / "manifest.json").read_bytes())
    *path, last = data.draw(st.sampled_from(paths_in(manifest)))
    inner = manifest
    for key in path:
        inner = inner[key]
    inner[last] = value
    read_changed(place, "manifest.json", json.dumps(manifest).encode())


@fuzzed
@given(file=st.sampled_from(FILES[1:]), field=st.sampled_from([*metric(), "reason"]), value=VALUES)
def test_any_value_in_a_record_is_shown_or_named(
    place: Place, file: str, field: str, value: Any
) -> None:
    line = json.dumps(metric(**{field: value})).encode() + b"\n"
    read_changed(place, file, (place.run / file).read_bytes() + line)


@fuzzed
@given(
    file=st.sampled_from(FILES),
    position=st.floats(0, 1),
    removed=st.integers(0, 40),
    inserted=st.binary(max_size=12)
    | st.sampled_from([b"\xff", b"\n", b"{", b"]", b"NaN", b"1e999"]),
)
@example("metrics.jsonl", 0.0, 0, b'{"v": 1, "step": ' + b"1" * 5000 + b"}\n")
@example("metrics.jsonl", 0.0, 0, b"\xef\xbb\xbf")
@example("manifest.json", 0.0, 10**6, b"")
def test_any_bytes_in_a_file_are_read_or_named(
    place: Place, file: str, position: float, removed: int, inserted: bytes
) -> None:
    data = (place.run / file).read_bytes()
    at = int(position * len(data))
    read_changed(place, file, data[:at] + inserted + data[at + removed :])


@fuzzed
@given(config=st.dictionaries(TEXTS, VALUES), hooks=st.lists(VALUES, max_size=2), seed=VALUES)
@example(config={}, hooks=[], seed={"run_id": "../../outside", "step": 10**400, "checkpoint": []})
def test_what_a_run_writes_itself_is_always_valid(
    tmp_path: Path, config: dict[str, Any], hooks: list[Any], seed: Any
) -> None:
    parent = seed if type(seed) is dict else None
    labels: Any = {"name": str(seed), "tags": [str(one) for one in hooks], "parent": parent}
    run = Run.create(tmp_path, config=config, hooks=hooks, seed=seed, **labels)
    run.log(1, 0, "x", 1.0)
    run.event("end", reason=seed)
    run.close("error", RuntimeError(str(seed)))
    assert open_run(run.path).damage == []
    Run.open(run.path, resume=True).close()
    shutil.rmtree(run.path)


@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(b"[NaN]")
@example(b"-1e999")
@example(rb'"\ud800"')
@example(b"[" * 201 + b"]" * 201)
@example(b"\xff\xfe1\0")
def test_what_the_parser_accepts_is_standard_json(data: bytes) -> None:
    try:
        value = parse_json(data)
    except ValueError:
        return
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    assert parse_json(text.encode()) == value
