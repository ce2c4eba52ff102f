"""A trainer in two processes, with DDP and FSDP2: the numbers, the decisions, the files."""

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
from distributed_training import train
from rank_checks import run_ranks
from torch import nn

import hookline
from hookline.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[1] / "support" / "distributed_training.py"
ORDER_OF_SUMS = 1e-5  # sums of floats in another order differ in the last bits, training adds up


def start(script: Path) -> Any:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command = [*launch, "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def run(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return what each rank wrote, by function."""
    run_ranks(SCRIPT, folder, *names)
    functions = [name.partition(":")[0] for name in names]
    return [
        {name: json.loads((folder / f"{name}-{rank}.json").read_text()) for name in functions}
        for rank in (0, 1)
    ]


def records(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = ("step", "epoch", "name", "value")
    return [{n: row[n] for n in names} for row in rows]


def assert_close(first: Any, second: Any, tolerance: float = ORDER_OF_SUMS) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            torch.tensor(first[name]), torch.tensor(second[name]), rtol=tolerance, atol=tolerance
        )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("alone")
    return train(folder / "train", accumulate=2), folder / "train"


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("ddp")
    return run(folder, "train", "decide", "fail_hooks", "resume", "end_together"), folder


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("fsdp")
    options = json.dumps({"strategy": "fsdp", "fsdp": {"wrap": ["Linear"]}})
    names = [f"{name}:{options}" for name in ("train", "resume", "fail_part")]
    return run(folder, *names), folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_like_one_with_twice_the_batches(alone, strategy, request) -> None:
    (first, second), folder = request.getfixturevalue(strategy)
    expected, one_folder = alone
    for rank in (first["train"], second["train"]):
        assert_close(rank["weights"], expected["weights"])
        assert rank["steps"] == expected["steps"] == 18
        assert rank["norms"] == pytest.approx(expected["norms"], rel=ORDER_OF_SUMS)
        assert rank["validated"] == pytest.approx(expected["validated"], rel=ORDER_OF_SUMS)
    assert first["train"]["weights"] == second["train"]["weights"]
    assert first["train"]["losses"] != second["train"]["losses"]  # each rank has its own
    both = zip(first["train"]["losses"], second["train"]["losses"], strict=True)
    means = [sum(pair) / 2 for pair in both]
    assert means == pytest.approx(expected["losses"], rel=ORDER_OF_SUMS)
    # The record has the means over all ranks, as if one process had trained.
    rows, expected_rows = records(folder / "train"), records(one_folder)
    assert [{**row, "value": 0} for row in rows] == [{**row, "value": 0} for row in expected_rows]
    values, expected_values = ([row["value"] for row in r] for r in (rows, expected_rows))
    assert values == pytest.approx(expected_values, rel=ORDER_OF_SUMS)


def test_hooks_run_in_their_ranks_and_all_ranks_have_the_same_run(ddp) -> None:
    (first, second), _ = ddp
    assert (first["train"]["on_main"], second["train"]["on_main"]) == (18, 0)
    assert first["train"]["run"] == second["train"]["run"]
    assert Path(first["train"]["run"][1]).is_dir()


def test_what_one_rank_decides_happens_in_all_at_the_same_step(ddp) -> None:
    for rank, results in enumerate(ddp[0]):
        decided = results["decide"]
        assert decided["stop"]["steps"] == 5
        assert decided["stop"]["status"] == "stopped"
        assert decided["skip"]["steps"] == 8
        assert len(decided["skip"]["skipped"]) == 1
        assert decided["save"]["saved"] == ["mine"]
        assert decided["toggle"]["on_main"] == (0 if rank else 5)
        assert decided["toggle"]["hooks"]["on_main"] == "disabled"
        assert results["fail_hooks"]["steps"] == 9
        assert results["fail_hooks"]["hooks"]["failing"] in ("failed", "disabled")
    first, second = (results["decide"] for results in ddp[0])
    assert first["stop"]["reason"] == "another process asked for it"
    assert second["stop"]["reason"] == "rank 1 asked"
    assert all(first[name]["weights"] == second[name]["weights"] for name in first)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_is_bit_identical(strategy, request) -> None:
    both, folder = request.getfixturevalue(strategy)
    for results in both:
        whole, parts = results["resume"]["whole"], results["resume"]["parts"]
        assert whole["weights"] == parts["weights"]
        assert whole["random"] == parts["random"]
        assert whole["losses"][7:] == parts["losses"]
    assert both[0]["resume"]["whole"]["random"] != both[1]["resume"]["whole"]["random"]
    assert records(folder / "resume" / "whole") == records(folder / "resume" / "parts")


def test_a_sharded_checkpoint_is_read_as_a_whole_by_one_process(fsdp) -> None:
    (first, _), folder = fsdp
    (path,) = (folder / "resume" / "whole").glob("*/checkpoints/*=14")
    names = {file.name for file in path.iterdir()}
    assert names >= {"model-1.safetensors", "state-1.safetensors"}
    checkpoint = load_checkpoint(path)
    shapes = {name: tuple(value.shape) for name, value in checkpoint.model.items()}
    expected = first["resume"]["whole"]["weights"]
    assert shapes == {name: tuple(torch.tensor(w).shape) for name, w in expected.items()}
    averages = checkpoint.state["hooks"]["ema"]["averages"]
    assert {name: tuple(value.shape) for name, value in averages.items()} == shapes
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 4)
    )
    hookline.open_run(path.parents[1]).checkpoints()[-1].load_into(model)
    assert all(torch.equal(model.state_dict()[n], v) for n, v in checkpoint.model.items())


def test_a_part_that_cannot_be_written_leaves_the_other_checkpoints(fsdp) -> None:
    both, folder = fsdp
    for results in both:
        assert results["fail_part"]["steps"] == 9
        assert results["fail_part"]["saved"] == ["epoch=0-step=4"]
    (checkpoints,) = (folder / "fail_part").glob("*/checkpoints")
    assert {path.name for path in checkpoints.iterdir()} == {"epoch=0-step=4", "last"}
    (run_folder,) = (folder / "fail_part").iterdir()
    (failed,) = hookline.open_run(run_folder).events("checkpoint_failed")
    assert "rank 1" in failed["error"]
    assert "No space left on device" in failed["error"]


def test_epochs_and_validations_end_together(ddp) -> None:
    first, second = (results["end_together"] for results in ddp[0])
    assert first["known"]["steps"] == second["known"]["steps"] == 14
    assert first["streamed"]["steps"] == second["streamed"]["steps"] == 12
    assert first["known"]["validated"] == second["known"]["validated"]


FAILING = """
import os, sys
sys.path.insert(0, {tests!r})
from distributed_training import RANK, Once, loaders, make

def fail(trainer):
    raise MemoryError("rank 1 has failed")

def wait(trainer):
    print("ready", flush=True)

trainer, watch = make({folder!r}, max_epochs={epochs})
loss_fn = trainer.loss_fn
trainer.loss_fn = lambda outputs, targets: check(trainer) or loss_fn(outputs, targets)

def check(trainer):
    if {fails} and RANK == 1 and trainer.step == 5:
        fail(trainer)
    if not {fails} and trainer.step == 5 and RANK == 0:
        wait(trainer)

trainer.fit(loaders()[0])
print("status", RANK, trainer.status, trainer.step, flush=True)
sys.exit(143 if trainer.status == "preempted" else 0)
"""


def write_script(tmp_path: Path, *, fails: bool, epochs: int) -> Path:
    script = tmp_path / "script.py"
    folder = str(tmp_path / "runs")
    tests = str(SCRIPT.parent)
    script.write_text(FAILING.format(tests=tests, folder=folder, fails=fails, epochs=epochs))
    return script


def test_an_exception_in_one_rank_ends_all(tmp_path: Path) -> None:
    process = start(write_script(tmp_path, fails=True, epochs=1))
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    cause = output[output.index("Root Cause") :]
    assert "MemoryError: rank 1 has failed" in cause
    (manifest,) = (tmp_path / "runs").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["status"] == "error"


def test_a_signal_to_the_agent_preempts_all_ranks_with_one_checkpoint(tmp_path: Path) -> None:
    process = start(write_script(tmp_path, fails=False, epochs=100_000))
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    (run_folder,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((run_folder / "manifest.json").read_text())
    assert manifest["status"] == "preempted", output
    checkpoints = [path.name for path in (run_folder / "checkpoints").iterdir() if path.is_dir()]
    assert len(checkpoints) == 1
