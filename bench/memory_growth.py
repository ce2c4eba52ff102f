"""Memory over 100,000 steps of a tiny model, in every loop: it must not grow.

Each loop trains in a process of its own, with and without a run, with a hook that reads the loss.
After a fifth of the steps and at the end, this hook counts the blocks of memory that Python has
allocated, and the memory of the process: `python -m bench.memory_growth "bare loop, run"` measures
one of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

import hookline
from bench import peers
from bench.data import AFTER, Batches
from bench.harness import Row, Spread

__all__ = ["run"]

STEPS, QUICK_STEPS = 100_000, 10_000
BLOCKS_LIMIT = 100.0  # per 1,000 steps: one object for each step would be 1,000
KILOBYTES_LIMIT = 100.0  # per 1,000 steps


class Memory(hookline.Hook):
    """Measures the memory after these steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.measured: list[tuple[int, float]] = []

    def on_step_end(self, step: int, loss: hookline.LazyFloat) -> None:
        if step in self.steps:
            gc.collect()
            self.measured.append((sys.getallocatedblocks(), resident_kilobytes()))


def resident_kilobytes() -> float:
    """Return the memory of this process, in kilobytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def train(hooks: list[Any], steps: int, runs: Path | None) -> None:
    """Train in Hookline's trainer."""
    model, optimizer = peers._model()
    config = hookline.TrainerConfig(runs=runs, progress="off", report=False)
    trainer = hookline.Trainer(config, model, optimizer, loss_fn=mse_loss, hooks=hooks)
    trainer.fit(Batches(steps - AFTER, 0))


def loop(hooks: list[Any], steps: int, runs: Path | None) -> None:
    """Train in an unchanged loop."""
    model, optimizer = peers._model()
    x, y = Batches(0, 0).batch
    with hookline.attach(model, optimizer, hooks=hooks, runs=runs, report=False):
        for _ in repeat(None, steps):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()


def loop_over_batches(hooks: list[Any], steps: int, runs: Path | None) -> None:
    """Train in a loop that takes its batches from the session, and accumulates over two."""
    model, optimizer = peers._model()
    with hookline.attach(model, optimizer, hooks=hooks, runs=runs, report=False) as session:
        for i, (x, y) in enumerate(session.batches(repeat(Batches(0, 0).batch, 2 * steps))):
            (mse_loss(model(x), y) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()


def host(train: Callable[..., None], names: tuple[str, str] | None = None) -> Callable[..., None]:
    """Return a function that trains in another library's trainer."""

    def run_host(hooks: list[Any], steps: int, runs: Path | None) -> None:
        train(Batches(steps - AFTER, 0, names), 0, hooks, runs=runs, report=False)

    return run_host


LOOPS: dict[str, Callable[..., None]] = {
    "trainer": train,
    "bare loop": loop,
    "session.batches": loop_over_batches,
    "Ignite": host(peers._ignite),
    "Lightning": host(peers._lightning),
    "Hugging Face": host(peers._hugging_face, ("x", "labels")),
}


def measure(name: str, steps: int) -> tuple[float, float]:
    """Return by how many blocks and kilobytes the memory grows in 1,000 steps of a loop."""
    loop_name, _, run_name = name.partition(", ")
    hook = Memory(steps // 5, steps)
    with tempfile.TemporaryDirectory() as folder:
        LOOPS[loop_name]([hook], steps, Path(folder) if run_name else None)
    (blocks, kilobytes), (blocks_after, kilobytes_after) = hook.measured
    thousands = (steps - steps // 5) / 1000
    return (blocks_after - blocks) / thousands, (kilobytes_after - kilobytes) / thousands


def run(*, quick: bool) -> list[Row]:
    steps = QUICK_STEPS if quick else STEPS
    rows: list[Row] = []
    for name in (f"{name}{run}" for name in LOOPS for run in ("", ", run")):
        command = [sys.executable, "-m", "bench.memory_growth", name, "--steps", str(steps)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        blocks, kilobytes = json.loads(output.splitlines()[-1])
        what = f"{name}: growth in 1,000 of {steps:,} steps"
        rows.append(Row(what, Spread.of([blocks]), "blocks", BLOCKS_LIMIT))
        rows.append(Row("  the same", Spread.of([kilobytes]), "KB", KILOBYTES_LIMIT))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m bench.memory_growth", description=__doc__)
    parser.add_argument("loop", help=f"{', '.join(LOOPS)}; with ', run' the record is written")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("hookline").setLevel(logging.ERROR)
    print(json.dumps(measure(options.loop, options.steps)))
