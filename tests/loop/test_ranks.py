"""Several processes: slow, failing and dying ranks, hooks of one rank, other numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_hookline
from distributed_training import describe, loaders, make
from rank_checks import run_ranks

from hookline import ModelCheckpoint

SCRIPT = Path(__file__).parents[1] / "support" / "rank_training.py"
ORDER_OF_SUMS = 1e-5  # sums of floats in another order differ in the last bits, training adds up


def start(*arguments: str, options: tuple[str, ...] = (), cwd: Path | None = None) -> Any:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*launch, "--standalone", *options, *arguments]
    return subprocess.Popen(command, env=environment, cwd=cwd, **pipes)


def finish(process: Any, *, fails: bool = False) -> str:
    try:
        output: str = process.communicate(timeout=300)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        raise
    assert (process.returncode != 0) is fails, output
    return output


def run(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return what each rank wrote, by function."""
    run_ranks(SCRIPT, folder, *names)
    return results(folder, *names)


def results(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [
        {name: json.loads((folder / f"{name}-{rank}.json").read_text()) for name in names}
        for rank in (0, 1)
    ]


def read_lines(folder: Path, file: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"2*/{file}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_close(first: Any, second: Any) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            torch.tensor(first[name]),
            torch.tensor(second[name]),
            rtol=ORDER_OF_SUMS,
            atol=ORDER_OF_SUMS,
        )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("two")
    # Checkpoints of one process, in the middle and at the end of an epoch of 18 batches.
    trainer, _ = make(folder / "one", max_steps=9, accumulate=2)
    trainer.add_hook(ModelCheckpoint(every_n_steps=1, save_top_k=-1, folder=folder / "one"))
    trainer.fit(loaders()[0])
    (folder / "one" / "epoch=0-step=6").rename(folder / "one" / "middle")
    (folder / "one" / "epoch=0-step=9").rename(folder / "one" / "end")
    return run(folder, "watch", "track", "change_size", "whole", "late_signal"), folder


def test_only_the_first_rank_tracks(two) -> None:
    (first, second), _ = two
    assert first["track"]["own"] == [["start", "completed"], [1, 2, 3]]
    assert first["track"]["attached"] == [["start", "completed"], [1, 2, 3]]
    assert second["track"] == {"own": [[], []], "attached": [[], []]}


def test_each_rank_has_its_failures_in_the_run(two) -> None:
    (first, second), folder = two
    (end,) = (e for e in read_lines(folder / "watch", "events.jsonl") if e["kind"] == "end")
    (other,) = end["hooks"]["other_ranks"]
    costs = {hook["name"]: hook for hook in other["hooks"]}
    assert other["rank"] == 1
    assert costs["failing"]["failures"] > 0
    assert "only in rank 1" in costs["failing"]["last_error"]
    assert "model_checkpoint" not in costs  # it runs in rank 0
    # Errors of rank 1 are logged with its number, what all ranks would say by rank 0.
    assert any(line.startswith("[rank 1] The hook") for line in second["watch"]["lines"])
    assert "the same in all ranks" in first["watch"]["lines"]
    assert "the same in all ranks" not in second["watch"]["lines"]


def test_checkpoints_of_a_hook_in_rank_0_are_kept_once(two) -> None:
    for rank in two[0]:
        assert rank["watch"]["saved"] == ["epoch=0-step=9", "last"]
        assert rank["watch"]["after"]


def test_a_checkpoint_of_one_process_continues_in_two(two) -> None:
    for rank in two[0]:
        changed = rank["change_size"]
        for name, step in {"middle": 6, "end": 9}.items():
            assert changed[name]["steps"] == 14
            assert len(changed[name]["losses"]) == 14 - step
            assert_close(changed[name]["weights"], changed["whole"]["weights"])


@pytest.mark.parametrize("step", [6, 9, 13])
def test_a_checkpoint_of_two_processes_continues_in_one(two, step: int, caplog) -> None:
    (first, _), folder = two
    trainer, seen = make(None, max_steps=14, accumulate=2)
    epoch = 0 if step < 10 else 1
    saved = folder / "change_size" / "saved" / f"epoch={epoch}-step={step}"
    trainer.fit(loaders()[0], resume_from=saved)
    assert "saved by 2 processes, and this run has 1" in caplog.text
    assert trainer.step == 14
    resumed = describe(trainer, seen)
    assert len(resumed["losses"]) == 14 - step
    assert_close(resumed["weights"], first["change_size"]["whole"]["weights"])


def test_a_rank_that_is_killed_does_not_change_the_result(two, tmp_path: Path) -> None:
    finish(start(str(SCRIPT), str(tmp_path), "die", options=("--max-restarts", "1")))
    for whole, died in zip(two[0], results(tmp_path, "die"), strict=True):
        assert died["die"]["restarts"] == "1"
        assert died["die"]["weights"] == whole["whole"]["weights"]
        assert died["die"]["steps"] == whole["whole"]["steps"] == 30
    (run_folder,) = (tmp_path / "die").glob("2*")
    assert json.loads((run_folder / "manifest.json").read_text())["status"] == "completed"


def test_a_signal_during_validation_and_accumulation_preempts_all_ranks(two, tmp_path) -> None:
    signals = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    arguments = str(SCRIPT), str(tmp_path), "interrupt"
    process = start(*arguments, options=signals)
    while "validating" not in (line := process.stdout.readline()):
        assert line, "ended too early"
    process.send_signal(signal.SIGUSR1)
    output = finish(process, fails=True)
    assert output.count("preempted SIGUSR1") == 2, output
    (run_folder,) = (tmp_path / "interrupt").glob("2*")
    assert json.loads((run_folder / "manifest.json").read_text())["status"] == "preempted"
    ranks = run(tmp_path, "interrupt")
    for whole, resumed in zip(two[0], ranks, strict=True):
        assert resumed["interrupt"]["weights"] == whole["whole"]["weights"]
    assert len(list((tmp_path / "interrupt").glob("2*"))) == 1


def test_a_signal_right_after_an_agreement_in_validation_waits_for_the_next(two) -> None:
    for whole in two[0]:
        late = whole["late_signal"]
        assert (late["status"], late["signal"], late["step"]) == ("preempted", "SIGUSR1", 10)
        assert late["weights"] == whole["whole"]["weights"]


PROJECT = """
import time
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.full((4,), i / 64), torch.ones(2)
"""
CONFIG = """
seed: 1
model: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 2}}
data:
  train: {class_path: project.Data, loader: {batch_size: 4, shuffle: true, num_workers: 1}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
loss_fn: torch.nn.functional.mse_loss
trainer: {max_epochs: 20, strategy: ddp, progress: plain}
hooks: [{name: model_checkpoint, every_n_steps: 20}]
"""


def test_the_command_line_trains_in_two_processes_and_speaks_once(tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "train.yaml").write_text(CONFIG)
    train = "-m", "hookline", "train", "train.yaml"
    process = start(*train, cwd=tmp_path)
    lines = []
    while "loss" not in (line := process.stdout.readline()):
        assert line, "ended too early"
        lines.append(line)
    process.send_signal(signal.SIGTERM)
    output = "".join(lines) + finish(process, fails=True)
    assert output.count("config ") == 1, output
    assert output.count("hookline: Preempted by SIGTERM") == 1
    (run_folder,) = (tmp_path / "runs").iterdir()
    resume = f"torchrun --nproc_per_node 2 -m hookline train train.yaml --resume {run_folder.name}"
    assert resume in output

    output = run_ranks(*train, "--resume", cwd=tmp_path)
    assert output.count("Resuming") == output.count("completed after") == 1, output
    assert "step 160" in output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run_folder.name]
    manifest = json.loads((run_folder / "manifest.json").read_text())
    assert manifest["status"] == "completed"

    output = finish(start(*train, "trainer.epochs=1", cwd=tmp_path), fails=True)
    report, _, cause = output.partition("Root Cause")
    assert report.count("] command line: trainer.epochs: Unknown key") == 1, output
    assert "Unknown key" in cause
    ended = run_hookline("verify", "train.yaml", cwd=tmp_path, WORLD_SIZE="2", RANK="0")
    assert ended.returncode == 1
    assert "Start it without torchrun" in ended.stderr
