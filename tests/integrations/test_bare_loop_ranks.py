"""Hooks in somebody's own script for torchrun: DDP, FSDP2 and Accelerate, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from distributed_loop_files import Noisy
from rank_checks import run_ranks, start_ranks

import hookline


def test_numbers_events_and_decisions_are_those_of_one_process(tmp_path: Path) -> None:
    assert run_ranks("distributed_loops.py", tmp_path).count("fine") == 2


def train_alone(folder: Path) -> None:
    """Save a checkpoint of one process."""
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with hookline.attach(model, optimizer) as session:
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.save_checkpoint(folder / "alone", wait=True)
    torch.save(model.state_dict(), folder / "alone.pt")


def test_validation_and_checkpoints_of_two_ranks(tmp_path: Path) -> None:
    train_alone(tmp_path)
    assert run_ranks("distributed_loop_files.py", tmp_path).count("fine") == 2
    # One process continues with the checkpoint of two.
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = hookline.attach(model, optimizer)
    start = session.load_checkpoint(tmp_path / "two")
    means = json.loads(session.state_dict()["state"])["means"]
    session.detach()
    assert start is not None
    assert (start.step, start.epoch, start.extra) == (2, 0, {"at": 1})
    for name, value in torch.load(tmp_path / "two.pt").items():
        assert torch.equal(model.state_dict()[name], value), name
    averages = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert [a.shape for a in averages] == [p.shape for p in model.parameters()]
    assert means["train/seen"] == {"mean": 0.5, "weight": 2.0}


def test_an_exception_in_one_rank_ends_all_and_is_shown(tmp_path: Path) -> None:
    processes = [start_ranks("distributed_crash.py", k, tmp_path / k) for k in ("ddp", "fsdp")]
    for kind, process in zip(("ddp", "fsdp"), processes, strict=True):
        try:
            output, errors = process.communicate(timeout=120)  # waits for ever if a rank does
        finally:
            process.kill()
        assert process.returncode != 0
        assert "rank 1 has seen ValueError('the data of rank 1 is damaged')" in output
        assert "ValueError: the data of rank 1 is damaged" in errors
        root_cause = errors.partition("Root Cause")[2]
        assert "rank      : 1" in root_cause, errors[-3000:]
        assert "the data of rank 1 is damaged" in root_cause
        (run,) = (tmp_path / kind).iterdir()
        assert json.loads((run / "manifest.json").read_text())["status"] != "completed"


def test_a_signal_to_one_rank_saves_and_ends_all_and_the_run_is_continued(tmp_path: Path) -> None:
    """DDP, FSDP2, and a program with a handler of its own, which ends its loop by itself."""
    cases = {"ddp": "step", "fsdp": "backward", "handler": "step"}
    for kind in cases:
        (tmp_path / kind).mkdir()
    processes = {
        kind: start_ranks("signalled_loop.py", tmp_path / kind, kind, when, "1")
        for kind, when in cases.items()
    }
    for kind, process in processes.items():
        try:
            _, errors = process.communicate(timeout=120)  # waits for ever if a rank does
        finally:
            process.kill()
        ended = [json.loads((tmp_path / kind / f"{rank}.json").read_text()) for rank in (0, 1)]
        assert ended == [{"status": "preempted", "step": 3, "first": 0}] * 2, errors[-3000:]
        assert errors.count("To continue it, call `session.load_checkpoint()`") == 1
        assert (process.returncode == 0) == (kind == "handler")
        (run,) = (tmp_path / kind / "runs").iterdir()
        assert json.loads((run / "manifest.json").read_text())["status"] == "preempted"
    for kind in ("ddp", "fsdp"):
        (tmp_path / f"whole_{kind}").mkdir()
        for folder, first in ((kind, 3), (f"whole_{kind}", 0)):
            run_ranks("signalled_loop.py", tmp_path / folder, kind, "never", "1")
            ended = json.loads((tmp_path / folder / "0.json").read_text())
            assert ended == {"status": "completed", "step": 6, "first": first}
        resumed, whole = (torch.load(tmp_path / f / "0.pt") for f in (kind, f"whole_{kind}"))
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
