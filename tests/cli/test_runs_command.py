"""`hookline runs` as a user meets it: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, HOOKLINE, run_in_process
from warm_processes import run_warm

from hookline.runs import Run, diff_runs, open_run

COMMAND = [*HOOKLINE, "runs"]


def runs(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_in_process("runs", *arguments, cwd=cwd)


def printed(*arguments: str | Path, cwd: Path | None = None) -> str:
    done = runs(*arguments, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    return done.stdout


def write(
    root: Path, config: dict[str, Any], losses: list[float], status: str = "completed"
) -> Run:
    hooks = [{"name": "ema", "kind": "loop", "options": {"decay": config["decay"]}}]
    hooks += [{"name": "extra"}] if config["decay"] > 0.9 else []
    run = Run.create(root, config=config, seed=config["seed"], hooks=hooks)
    for step, loss in enumerate(losses, 1):
        run.log(step, 0, "train/loss", loss)
    commit = "0123456789abcdef" if status == "completed" else None
    run.update(git={"commit": commit}, sources={"__main__": "ab"})
    if status != "training":
        run.close(status, "ValueError: no" if status == "error" else None)
    return run


class Three:
    """A folder of three runs: two that ended, and one that its process has left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root = folder / "runs"
        self.first = write(
            root, {"seed": 1, "decay": 0.9, "model": {"width": 8}}, [3.0, float("nan"), 1.5]
        )
        self.second = write(
            root, {"seed": 1, "decay": 0.99, "model": {"width": 16}}, [3.0, 1.25, 2.0], "error"
        )
        self.third = write(root, {"seed": 1, "decay": 0.9}, [4.0], "training")
        self.third.flush()
        part = {**self.third.manifest["attempts"][0], "pid": 2**22 + 1}
        self.third.update(attempts=[part], git={"commit": "fedcba9876543210", "dirty": True})


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Three:
    return Three(tmp_path_factory.mktemp("three"))


# -- the list -------------------------------------------------------------------------------------


def test_runs_are_listed_the_newest_first(three: Three) -> None:
    heads, *rows = printed(cwd=three.folder).splitlines()
    assert re.split(r"  +", heads) == [*("id", "duration", "status", "steps", "last loss", "git")]
    third, second, first = (re.split(r"  +", row) for row in rows)
    assert [row[0] for row in (first, second, third)] == [
        *(three.first.id, three.second.id, three.third.id)
    ]
    assert first[2:] == ["completed", "3", "1.5", "01234567"]
    assert second[2:] == ["error", "3", "2", "none"]
    assert third[2:] == ["lost", "1", "4", "fedcba98+"]


def test_the_list_as_json(three: Three) -> None:
    for arguments in (("--json", "--runs", three.folder / "runs"), ("--json",)):
        found = json.loads(printed(*arguments, cwd=three.folder))
        assert [one["status"] for one in found] == ["lost", "error", "completed"]
        assert found[2]["id"] == three.first.id
        assert (found[2]["steps"], found[2]["loss"]) == (3, 1.5)
        assert found[0]["git"]["dirty"] is True
        assert found[1]["last_error"] == "ValueError: no"
        assert found[1]["seconds"] > 0


def test_a_folder_without_runs_is_no_error(tmp_path: Path) -> None:
    assert "The folder runs does not exist yet." in printed(cwd=tmp_path)
    assert "hookline demo" in printed(cwd=tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("")
    (tmp_path / "runs" / "plots").mkdir()
    assert "The folder runs has no runs yet." in printed(cwd=tmp_path)
    assert json.loads(printed("--json", cwd=tmp_path)) == []


def test_damaged_runs_are_listed_among_the_others(tmp_path: Path) -> None:
    good = write(tmp_path, {"seed": 1, "decay": 0.9}, [1.0])
    for name, text in (("20200101-000000-aaaaaa", None), ("20200101-000000-bbbbbb", "{")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "manifest.json").write_text(text)
    *lines, _, broken, empty = printed("--runs", tmp_path).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *(good.id, "20200101-000000-bbbbbb", "20200101-000000-aaaaaa")
    ]
    assert "unknown" in lines[2]
    assert "20200101-000000-bbbbbb/manifest.json cannot be read: Expecting" in broken
    assert "20200101-000000-aaaaaa: manifest.json is missing" in empty


# -- one run --------------------------------------------------------------------------------------


def test_a_run_is_shown(three: Three) -> None:
    shown = printed("show", three.first.id, cwd=three.folder)
    assert shown == str(open_run(three.first.path)).replace(f"{three.folder}/", "") + "\n"
    assert re.search(r"^train/loss +1.5 +1.5 +3 +3$", shown, re.MULTILINE)
    shown = printed("show", three.second.path)
    assert re.search(r"^last error +ValueError: no$", shown, re.MULTILINE)
    assert re.search(r"^hooks +ema, extra$", shown, re.MULTILINE)


def test_a_run_as_json(three: Three) -> None:
    commands: list[tuple[str | Path, ...]] = [
        ("show", three.first.id, "--json", "--runs", three.folder / "runs"),
        ("--json", "--runs", three.folder / "runs", "show", three.first.id),
    ]
    for command in commands:
        found = json.loads(printed(*command))
        assert found["manifest"] == three.first.manifest
        assert found["results"]["train/loss"]["best"] == 1.5
        assert found["checkpoints"] == found["damage"] == []
        assert found["id"] == three.first.id


def test_an_unknown_id_is_one_line_with_the_near_ones(three: Three) -> None:
    near = three.first.id[:-1] + "!"
    for command in (("show", near), ("diff", near, three.first.id), ("diff", "--json", near, "x")):
        done = runs(*command, cwd=three.folder)
        assert (done.returncode, done.stdout) == (1, "")
        start = f"hookline: There is no run '{near}' in runs. Did you mean '"
        assert done.stderr.startswith(start)
        assert three.first.id in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = runs("show", "2", cwd=three.folder)
    assert done.returncode == 1
    assert "'2' matches 3 runs" in done.stderr


# -- two runs -------------------------------------------------------------------------------------


def test_what_differs_is_told_by_section(three: Three) -> None:
    shown = printed("diff", three.first.id, three.second.id, cwd=three.folder)
    blocks = {block.split()[0]: block for block in shown.strip().split("\n\n")}
    assert list(blocks) == ["config", "code", "hooks", "versions", "results"]
    config = [line.split() for line in blocks["config"].splitlines()]
    assert config == [
        ["config", three.first.id, three.second.id],
        ["decay", "0.9", "0.99"],
        ["model.width", "8", "16"],
    ]
    assert ["commit", "0123456789abcdef", "-"] in map(str.split, blocks["code"].splitlines())
    hooks = [line.split() for line in blocks["hooks"].splitlines()]
    assert ["ema.options.decay", "0.9", "0.99"] in hooks
    assert hooks[1] == ["order", "['ema']", "['ema',", "'extra']"]
    assert blocks["versions"].split() == ["versions", "identical"]
    results = [re.split(r"  +", line) for line in blocks["results"].splitlines()[1:]]
    assert results == [
        ["status", "completed", "error"],
        ["train/loss (last)", "1.5", "2"],
        ["train/loss (best)", "1.5", "1.25"],
    ]


def test_versions_and_code_that_differ_are_told(tmp_path: Path) -> None:
    one = write(tmp_path, {"seed": 1, "decay": 0.9}, [float("nan")])
    other = write(tmp_path, {"seed": 1, "decay": 0.9}, [float("nan")])
    assert all(not pairs for pairs in diff_runs(open_run(one.path), open_run(other.path)).values())
    manifest = json.loads((other.path / "manifest.json").read_text())
    manifest["packages"]["numpy"] = "0.1"
    del manifest["packages"]["pytest"]
    manifest["versions"]["python"] = "2.7"
    manifest["devices"]["threads"] = 99
    manifest["git"] = {"commit": "0123456789abcdef", "dirty": True, "diff_sha256": "ab"}
    manifest["config"]["seed"] = True  # which Python takes for 1
    (other.path / "manifest.json").write_text(json.dumps(manifest))
    found = diff_runs(open_run(one.path), open_run(other.path))
    assert found["versions"].keys() == {"numpy", "pytest", "python", "devices.threads"}
    assert found["versions"]["pytest"] == [pytest.__version__, None]
    assert found["code"] == {"dirty": [None, True], "diff_sha256": [None, "ab"]}
    assert found["config"] == {"seed": [1, True]}


PROGRAM = """
import torch, hookline
from layers import Net

class Source:  # its repr has an address
    pass

torch.manual_seed(0)
model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hparams = {"source": Source(), "nested": [Source()]}
with hookline.attach(model, optimizer, runs="runs", hparams=hparams, report=False) as session:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(session.run.path)
"""


def compare_code(folder: Path, *paths: str) -> str:
    """Return what `runs diff` says about the code of two runs."""
    shown = printed("diff", *paths, cwd=folder)
    (block,) = (block for block in shown.split("\n\n") if block.startswith("code"))
    assert "config  identical" in shown
    return block


def test_the_code_of_runs_without_git_is_compared_by_its_source_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    layers = "import torch\nclass Net(torch.nn.Linear): pass\n"

    def train(*program: str) -> str:
        environment = ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        environment |= {"PYTHONPATH": os.pathsep.join([*sys.path, "."])}
        done = run_warm(program, cwd=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    (tmp_path / "layers.py").write_text(layers)
    first, second = train("train.py"), train("train.py")
    (tmp_path / "layers.py").write_text(layers + "# another one\n")
    changed = train("train.py")
    assert compare_code(tmp_path, first, second) == "code  identical"
    lines = compare_code(tmp_path, second, changed).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("module layers")


def test_the_code_of_runs_of_which_nothing_is_known_is_unknown(tmp_path: Path) -> None:
    for name in "ab":
        run = write(tmp_path, {"seed": 1, "decay": 0.9}, [1.0])
        manifest = json.loads((run.path / "manifest.json").read_text())
        manifest["git"] = {"commit": None, "problem": "not in a git repository"}
        del manifest["sources"]  # a version before wrote it
        (run.path / "manifest.json").write_text(json.dumps(manifest))
        run.path.rename(tmp_path / name)
    found = diff_runs(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert found["code"] == {"modules": ["unknown", "unknown"]}


# -- the command itself ---------------------------------------------------------------------------


def in_a_terminal(three: Three, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    parent, child = pty.openpty()
    process = subprocess.Popen(
        COMMAND,
        stdout=child,
        stderr=child,
        cwd=three.folder,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
    )
    os.close(child)
    seen = b""
    try:
        while data := os.read(parent, 65536):
            seen += data
    except OSError:  # the other end is closed
        pass
    os.close(parent)
    assert process.wait() == 0
    return seen.decode()


def test_a_terminal_gets_colours_unless_they_are_not_wanted(three: Three) -> None:
    shown = in_a_terminal(three)
    assert "\x1b[1m" in shown
    assert re.search(r"\x1b\[31m *lost", shown)
    plain = in_a_terminal(three, NO_COLOR="1")
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d*m", "", shown) == plain
