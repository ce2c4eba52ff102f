"""Hookline's trainer over a bare loop: with ten do-nothing hooks, and with none.

The record (a run folder on disk), the counters and the check for a NaN loss are on, as in
production. The model is as small as they come, so that what the loop costs cannot hide.
"""

from __future__ import annotations

import gc
import resource
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import hookline
from bench import peers
from bench.data import Batches
from bench.harness import Candidate, Row, Spread, interleave
from bench.raw import WARMUP, BeforeStep, bare

__all__ = ["run"]

TEN = 10


def run(*, quick: bool) -> list[Row]:
    steps, rounds = (200, 8) if quick else (400, 40)
    candidates: dict[str, Candidate] = {
        "bare": partial(_bare, steps),
        "bare again": partial(_bare, steps),
        "no hooks": partial(_trainer, 0, steps),
        "no record": partial(_trainer, 0, steps, records=False),
        "ten hooks": partial(_trainer, TEN, steps),
        **peers.loops(hooks=TEN, steps=steps, warmup=WARMUP),
    }
    measured = interleave(candidates, rounds=rounds, warmup=1)
    ratios = {name: measured.ratio(name, "bare") for name in candidates}
    micro = {name: f"{measured.time(name) * 1e6:.1f} µs" for name in candidates}
    peer_text = {
        name: f"{ratios[name].median:.2f} × ({micro[name]})"
        for name in peers.NAMES
        if name in measured
    }
    return [
        Row(
            "trainer, ten hooks on two events each, over the bare loop",
            ratios["ten hooks"],
            "×",
            limit=1.10,
            note=f"bare {micro['bare']} per step, trainer {micro['ten hooks']}",
            peers=peer_text,
        ),
        Row(
            "trainer, no hooks, over the bare loop",
            ratios["no hooks"],
            "×",
            limit=1.06,
            note=micro["no hooks"],
        ),
        Row(
            "the record (loss, system, time of phases), of a step of 5 ms",
            measured.excess("no hooks", "no record").scaled(100 / 0.005),
            "%",
            limit=1.0,
        ),
        Row("    the bare loop over itself (the noise)", ratios["bare again"], "×"),
        Row(
            "trainer, memory after 100,000 steps over that after 2,000",
            _one(memory(10_000 if quick else 100_000)),
            "MB",
            limit=1.0,
        ),
    ]


def _parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _bare(steps: int) -> float:
    batches = Batches(steps, WARMUP)
    bare(*_parts(), batches)
    return batches.seconds_per_step


def _trainer(hooks: int, steps: int, *, records: bool = True) -> float:
    batches = Batches(steps, WARMUP)
    with tempfile.TemporaryDirectory() as folder:
        config = hookline.TrainerConfig(runs=Path(folder) if records else None, progress="off")
        trainer = hookline.Trainer(
            config, *_parts(), loss_fn=mse_loss, hooks=[BeforeStep() for _ in range(hooks)]
        )
        trainer.fit(batches)
    return batches.seconds_per_step


def memory(steps: int = 100_000) -> float:
    """How much more the process holds after so many steps than the bare loop's, in MB."""
    data = [(torch.ones(4, 8), torch.ones(4, 8))] * 1000
    with tempfile.TemporaryDirectory() as folder:
        config = hookline.TrainerConfig(runs=Path(folder), progress="off", max_steps=2000)
        hookline.Trainer(config, *_parts(), loss_fn=mse_loss).fit(data)
        before = _resident()
        config = hookline.TrainerConfig(runs=Path(folder), progress="off", max_steps=steps)
        hookline.Trainer(config, *_parts(), loss_fn=mse_loss).fit(data)
        return _resident() - before


def _resident() -> float:
    """Return the memory of the process now, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _one(value: float) -> Spread:
    return Spread(value, value, value)
