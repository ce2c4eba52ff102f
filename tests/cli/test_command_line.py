"""The command line, as a user meets it: real processes, what they print and how they end."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, HOOKLINE, call_hookline, run_command, run_hookline, run_python

from hookline.cli import demo_command as demo
from hookline.errors import HooklineError


def manifest_in(out: Path) -> dict[str, Any]:
    (run,) = out.iterdir()
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return manifest


def value_of(word: str, printed: str) -> str:
    found = re.search(rf"^{word} +(\S+)", printed, re.MULTILINE)
    assert found, printed
    return found[1]


def test_python_m_hookline_is_the_installed_command() -> None:
    installed = str(Path(sys.executable).with_name("hookline"))
    for arguments in (["--version"], ["no_such_command"]):
        module, script = run_hookline(*arguments), run_command(installed, *arguments)
        assert (module.returncode, module.stdout, module.stderr) == (
            script.returncode,
            script.stdout,
            script.stderr,
        )


class Trained:
    """A demo of 60 steps: what it printed, and what it left behind."""

    def __init__(self, folder: Path) -> None:
        done = run_hookline("demo", "--steps", 60, cwd=folder)
        assert done.returncode == 0, done.stderr
        self.printed, self.errors = done.stdout, done.stderr
        (self.run,) = (folder / "runs").iterdir()
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        self.metrics = [json.loads(line) for line in lines]

    def values(self, name: str) -> list[float]:
        return [one["value"] for one in self.metrics if one["name"] == name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("demo"))


def test_the_demo_ends_with_the_paths_of_what_it_leaves_behind(trained: Trained) -> None:
    run = Path("runs", trained.run.name)
    folder, checkpoint, weights, hint, hooks = trained.printed.splitlines()[-5:]
    assert folder.split() == ["run", str(run)]
    assert checkpoint.split() == ["checkpoint", str(run / "checkpoints" / "step_000060")]
    file = trained.run / "checkpoints" / "step_000060" / "model.safetensors"
    assert weights.split()[1] == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert hint.startswith("metrics ")
    assert hooks.split() == ["source", str(Path(demo.__file__))]
    assert trained.errors == ""


def test_the_demo_is_a_completed_run_on_disk(trained: Trained) -> None:
    manifest = json.loads((trained.run / "manifest.json").read_text())
    assert manifest["status"] == "completed"
    assert manifest["seed"] == 0
    assert [hook["name"] for hook in manifest["hooks"]] == [
        "validation_curve",
        "checkpoint_at_end",
        "gradient_monitor",
        "outlier_monitor",
        "lr_monitor",
        "lint",
        "identity",
    ]
    events = map(json.loads, (trained.run / "events.jsonl").read_text().splitlines())
    [lint] = [event for event in events if event["kind"] == "lint"]
    assert lint["findings"] == 0
    assert len(set(trained.values("gradients/total/norm"))) >= 30


def test_the_validation_loss_of_the_demo_falls(trained: Trained) -> None:
    losses = trained.values("val/loss")
    assert losses[-1] < losses[0] - 1
    shown = re.findall(r"^  step +(\d+) +([\d.]+)  #+", trained.printed, re.MULTILINE)
    assert [int(step) for step, _ in shown] == list(range(0, 61, 6))
    assert float(shown[0][1]) == pytest.approx(losses[0], abs=1e-3)
    assert float(shown[-1][1]) == pytest.approx(losses[-1], abs=1e-3)


def test_the_demo_writes_other_text_after_training(trained: Trained) -> None:
    before, after = (
        trained.printed.split(f"Text generated {when} training\n")[1].split("\n\n")[0]
        for when in ("before", "after")
    )
    assert before != after
    assert after.count(" ") > before.count(" ")  # it has learned that words have an end


def test_piped_progress_is_plain_lines(trained: Trained) -> None:
    assert "\x1b" not in trained.printed
    assert "\r" not in trained.printed
    assert "step 60/60" in trained.printed
    assert "completed after 60 steps" in trained.printed
    assert re.search(r"^gradient_monitor +\d+ ", trained.printed, re.MULTILINE)  # the summary


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    def weights(seed: int) -> str:
        done = run_hookline("demo", "--steps", 3, "--seed", seed, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        return value_of("weights", done.stdout)

    with ThreadPoolExecutor() as pool:
        first, again, other = pool.map(weights, (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo --steps 0", ["'--steps'", "equal to 1", "See: hookline demo --help"]),
        (f"demo --seed {2**64}", ["'--seed'"]),
        ("demo --out file", ["'--out'", "'file' is a file", "expected a folder"]),
        ("demo --out /proc/runs", ["'--out'", "'/proc/runs' cannot be written", "a folder"]),
        ("demo --stepps 3", ["--stepps", "--steps", "See: hookline demo --help"]),
        ("init file/inside", ["'file/inside", "cannot be written"]),
        ("hooks show", ["NAME", "See: hookline hooks show --help"]),
        ("hooks shw", ["shw", "See: hookline hooks --help"]),
        ("runs show", ["Missing argument 'ID'", "See: hookline runs show --help"]),
        ("runs --jsno", ["--jsno", "--json", "See: hookline runs --help"]),
        ("runs show x --runs file", ["'--runs': 'file' is a file; expected the folder of all"]),
        ("checkpoints list x --runs file", ["'--runs': 'file' is a file"]),
        ("train", ["Missing argument"]),
        ("train train.yaml epochs", ["'epochs' is not a valid override. Expected"]),
        ("train train.yaml trainer.max_epochs=", ["write trainer.max_epochs=null"]),
        ("check net.py", ["net.py:make_trainer"]),
        ("schema --out no/such/folder", ["'no/such/folder' cannot be written"]),
    ],
)
def test_bad_input_is_one_line_that_helps(arguments: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = call_hookline(*arguments.split(), cwd=tmp_path)
    assert code == 2
    assert len(output.splitlines()) == 1, output
    assert output.startswith("hookline: ")
    for word in words:
        assert word in output
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_help_teaches_with_examples_and_imports_neither_torch_nor_yaml() -> None:
    script = (
        "import sys, hookline.cli.app as app\n"
        "from typer.main import get_command\n"
        "groups = get_command(app.app).commands\n"
        "inner = [[n, i] for n, one in groups.items() for i in getattr(one, 'commands', ())]\n"
        "for words in [[], *([name] for name in groups), *inner]:\n"
        "    sys.argv = ['hookline', *words, '--help']\n"
        "    try: app.main()\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'yaml'} & set(sys.modules)"
    )
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for example in (
        "hookline demo --steps 100 --out /tmp/runs --seed 1",
        "hookline train train.yaml --resume",
        "hookline hooks show gradient_monitor",
        "hookline checkpoints export 20261115-21 -c best -o model.safetensors",
    ):
        assert example in done.stdout


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("run", "Without any: gradients, learning rate, loss spikes and non-finite values."),
        ("lint", "Keep the run and its report in this folder of runs; by default nothing is kept."),
    ],
)
def test_help_says_what_is_the_default(command: str, sentence: str) -> None:
    code, output = call_hookline(command, "--help")
    assert code == 0
    assert sentence in " ".join(output.replace("│", " ").split())


def test_an_error_of_hookline_is_its_message_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(**options: Any) -> None:
        raise HooklineError("No disk. Buy one.")

    monkeypatch.setattr(demo, "run_demo", fail)
    code, output = call_hookline("demo", cwd=tmp_path)
    assert (code, output) == (1, "hookline: No disk. Buy one.\n")


def test_ctrl_c_ends_the_run_cleanly(tmp_path: Path) -> None:
    command = [*HOOKLINE, "demo", "--steps", "5000", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 1/5000" in line:
                break
        time.sleep(0.3)  # in the middle of a step
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "hookline: Interrupted.\n"
    (run,) = tmp_path.iterdir()
    assert f"is in {run}" in printed
    manifest = manifest_in(tmp_path)
    assert manifest["status"] == "interrupted"
    assert manifest["ended"] is not None


def test_ctrl_c_while_torch_is_imported_is_no_traceback(tmp_path: Path) -> None:
    script = (  # torch imports numpy, which makes an ImportError of Ctrl-C
        "import os, signal, sys, hookline.cli.app as app\n"
        "class Presser:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'numpy.exceptions': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Presser())\n"
        f"sys.argv = ['hookline', 'demo', '--out', {str(tmp_path)!r}]\n"
        "app.main()"
    )
    done = run_python(script)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "hookline: Interrupted.\n"
    assert not list(tmp_path.iterdir())
