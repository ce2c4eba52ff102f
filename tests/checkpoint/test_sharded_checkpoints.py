"""Checkpoints of FSDP2 trainings in real processes: other numbers of ranks, signals, lost ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_checks import run_ranks
from safetensors.torch import load_file
from sharded_training import checkpoint_of, resume, train

import hookline
from hookline.checkpoint.catalog import verify_checkpoint
from hookline.checkpoint.export import export_weights

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_training.py"
# Two ranks add the gradients of their batches in another order than one process that accumulates
# them: sums differ in the last bits of a float32 (6e-8), and AdamW's steps of 0.01 carry that on.
ORDER_OF_SUMS = 1e-5


def start(folder: Path, name: str, **variables: str) -> Any:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command = [*launch, "--standalone", str(SCRIPT), str(folder), name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def wait_for(process: Any, text: str) -> str:
    """Return the first line with a text."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError("".join(seen))


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    assert first
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_close(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=ORDER_OF_SUMS, atol=ORDER_OF_SUMS
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Return what one process has, what each of two ranks has, and the folder."""
    folder = tmp_path_factory.mktemp("sharded")
    one = train(folder / "one", accumulate=2)  # a step has as many batches as with two ranks
    run_ranks(SCRIPT, folder, "all")
    ranks = [torch.load(folder / f"results-{rank}.pt") for rank in (0, 1)]
    return one, ranks, folder


def test_two_ranks_save_what_they_have_and_one_process_loads_it_bit_for_bit(trained) -> None:
    one, ranks, folder = trained
    assert_equal(ranks[0]["two"]["saved"], ranks[1]["two"]["saved"])
    resumed = resume(checkpoint_of(folder / "two"), folder / "from_two", accumulate=2)
    assert_equal(resumed["loaded"], ranks[0]["two"]["saved"])
    assert_close(resumed["end"], ranks[0]["two"]["end"])
    assert_close(resumed["end"], one["end"])


def test_one_process_saves_and_two_ranks_load_it_bit_for_bit(trained) -> None:
    one, ranks, _ = trained
    for rank in ranks:
        assert_equal(rank["from_one"]["loaded"], one["saved"])
        assert_close(rank["from_one"]["end"], one["end"])


def test_each_rank_reads_its_parts_and_all_refuse_a_damaged_file_of_one(trained) -> None:
    for rank, results in enumerate(trained[1]):
        assert all(results["read_parts"]["sharded"])
        error = results["read_parts"]["error"]
        assert "model-1.safetensors has changed since it was written (wrong hash)" in error
        assert error.startswith("Rank 1 could not read the checkpoint") is (rank == 0)


def test_each_rank_of_a_fork_reads_its_parts_and_continues_bit_for_bit(trained) -> None:
    for rank, results in enumerate(trained[1]):
        forked = results["fork"]
        assert forked["sharded"]
        assert all(forked["sharded"])
        assert_equal(forked["end"], results["two"]["end"])
        assert forked["error"].startswith("Rank 1 could not read the checkpoint") is (rank == 0)
        assert "model-1.safetensors has changed since it was written" in forked["error"]


def test_a_sharded_checkpoint_is_exported_to_one_file(trained) -> None:
    _, ranks, folder = trained
    saved = ranks[0]["two"]["saved"]
    path = checkpoint_of(folder / "two")
    exported = export_weights(path, folder / "weights.safetensors")
    assert exported.tied == {"last.weight": "first.weight"}
    weights = load_file(exported.path)
    weights["last.weight"] = weights["first.weight"]
    assert_equal(
        {f"model.{name}": value for name, value in weights.items()},
        {name: value for name, value in saved.items() if name.startswith("model.")},
    )
    averaged = export_weights(path, folder / "averaged.safetensors", averaged=True)
    for name, value in load_file(averaged.path).items():
        assert torch.equal(value, saved[f"ema.{name}"])


def test_a_checkpoint_through_accelerates_fsdp2_plugin_is_resumed_bit_for_bit(trained) -> None:
    for results in (rank["accelerate"] for rank in trained[1]):
        assert "model-1.safetensors" in results["files"]
        assert_equal(results["again"]["loaded"], results["saved"])
        assert_equal(results["again"]["end"], results["end"])


@pytest.mark.parametrize("is_killed", [False, True], ids=["in time", "killed"])
def test_a_signal_while_a_checkpoint_is_written_leaves_valid_ones_and_the_job_resumes(
    tmp_path: Path, is_killed: bool
) -> None:
    grace = {"SLEEP": "600", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"} if is_killed else {"SLEEP": "2"}
    process = start(tmp_path, "save_slowly", **grace)
    wait_for(process, "in flight")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    (run,) = (tmp_path / "save_slowly").iterdir()
    status = hookline.open_run(run).manifest["status"]
    complete = sorted(path for path in (run / "checkpoints").glob("[!.]*") if path.is_dir())
    assert "epoch=0-step=4" in {path.name for path in complete}
    assert [verify_checkpoint(path) for path in complete] == [None] * len(complete)
    if is_killed:
        assert len(complete) == 1
    else:
        assert status == "preempted", output
        assert len(complete) > 1  # with that of the signal
        assert not list((run / "checkpoints").glob(".*"))
    output = run_ranks(SCRIPT, tmp_path, "save_slowly")
    assert {f"end {rank} completed 40" for rank in (0, 1)} <= set(output.splitlines())
    assert not list((run / "checkpoints").glob(".*"))  # what the killed processes left
    assert [path.name for path in (tmp_path / "save_slowly").iterdir()] == [run.name]
