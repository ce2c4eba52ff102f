"""`hookline lint` in real processes: what it finds in a script, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, HOOKLINE, call_hookline
from warm_processes import run_warm

SCRIPT = """
import os, sys, time
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, STEPS + 1):
    x = torch.randn(8, 4)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    ZERO
    print("step", step, flush=True)
    AFTER
print("the end", flush=True)
"""
ZERO = "optimizer.zero_grad()"
CHECK = "gradients-not-zeroed"


def write(folder: Path, zero: str = ZERO, *, steps: int = 50, after: str = "pass") -> Path:
    file = folder / "train.py"
    text = SCRIPT.replace("STEPS", str(steps)).replace("ZERO", zero).replace("AFTER", after)
    file.write_text(text)
    return file


def lint(
    folder: Path,
    *options: str,
    command: tuple[str, ...] = (sys.executable,),
    script: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, with a folder of its own for temporary files."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    words = ["-m", "hookline", "lint", *options, "--", *command, script or "train.py"]
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary), "HOOKLINE_REPORT": "1"}
    return run_warm(words, cwd=folder, environment=environment)


def test_a_bug_is_printed_with_its_fix_and_the_exit_code_is_1(tmp_path: Path) -> None:
    write(tmp_path, "pass", steps=5, after="step == 5 and sys.exit(7)")
    done = lint(tmp_path, "--runs", "kept")
    assert done.returncode == 1, done.stderr
    assert f"Lint: error {CHECK} at step 3: SGD\n    Before backward" in done.stderr
    assert "\n    Fix: Call optimizer.zero_grad() in each step" in done.stderr
    assert " checks, 1 finding, 1 error.\n    Left out: " in done.stderr
    assert done.stderr.count(CHECK) == 1
    [run] = (tmp_path / "kept").iterdir()
    assert (run / "report.html").exists()
    assert f"run kept/{run.name}" in done.stderr


def test_only_the_number_of_steps_is_trained_and_no_path_is_shown(tmp_path: Path) -> None:
    write(tmp_path)
    done = lint(tmp_path, "--steps", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"step {i}" for i in range(1, 7)]  # it ends within the 7th
    assert " checks, 0 findings, 0 errors." in done.stderr
    assert "hookline-lint-" not in done.stderr
    assert "report" not in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith("run ")]
    assert not [each for each in (tmp_path / "temporary").iterdir() if "hookline" in each.name]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import torch; torch.optim.SGD([torch.zeros(1)])", 2),
        ("raise SystemExit(5)", 5),
    ],
    ids=["no step", "ends before"],
)
def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "train.py").write_text(text)
    done = lint(tmp_path)
    assert done.returncode == code
    assert "hookline: nothing was trained that could be linted" in done.stderr


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ("step == 4 and os.kill(os.getpid(), 9)", 137),
        pytest.param("step == 4 and 1 / 0", 1, marks=pytest.mark.soak),
    ],
    ids=["killed", "exception"],
)
def test_a_script_that_fails_passes_its_code_on(tmp_path: Path, after: str, code: int) -> None:
    write(tmp_path, after=after)
    done = lint(tmp_path)
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)


def test_json_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    write(tmp_path, "pass")
    done = lint(tmp_path, "--json", "--steps", "6", "--ignore", "labels-sorted")
    assert done.returncode == 1
    found: dict[str, Any] = json.loads(done.stdout)
    [finding] = found["findings"]
    assert set(finding) == {"check", "severity", "step", "rank", "subject", "message", "fix"}
    assert (finding["check"], finding["subject"], finding["step"]) == (CHECK, "SGD", 3)
    assert (found["exit_code"], found["script_code"], found["has_trained"]) == (1, 0, True)
    assert found["checks"] > 5
    assert found["left_out"]["labels-sorted"] == "ignored"
    assert "step 5" in done.stderr  # of the script


def test_checks_are_chosen_by_name(tmp_path: Path) -> None:
    write(tmp_path, "pass")
    done = lint(tmp_path, "--only", CHECK, "--steps", "5")
    assert done.returncode == 1
    assert "hookline: 1 checks, 1 finding" in done.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--only", "gradient-not-zeroed", "--", "python"], f"Did you mean '{CHECK}'?"),
        (["--", "no-such-program"], "There is no program 'no-such-program'"),
        (["--", sys.executable, "-I", "train.py"], "-I ignores what Hookline adds"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_run(
    tmp_path: Path, words: list[str], problem: str
) -> None:
    code, output = call_hookline("lint", *words, cwd=tmp_path)
    assert code == 2
    assert problem in output


def test_ctrl_c_ends_the_script_and_the_command(tmp_path: Path) -> None:
    write(tmp_path, after="time.sleep(60 if step == 3 else 0)")
    process = subprocess.Popen(
        [*HOOKLINE, "lint", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "step 3\n":
            break
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 130, errors
    assert not list(tmp_path.glob("hookline-lint-*"))


TWO_RANKS = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (x,) in DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_two_ranks_of_torchrun_are_one_verdict(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_RANKS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    done = lint(tmp_path, "--json", command=torchrun)
    found = json.loads(done.stdout)
    assert [each["check"] for each in found["findings"]] == ["same-data-on-all-ranks"], done.stderr
    assert (done.returncode, found["script_code"]) == (1, 0)
    assert done.stderr.count("error same-data-on-all-ranks") == 1
