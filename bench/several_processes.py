"""The trainer on two ranks over plain DDP and plain FSDP2 in a bare loop, and the cost of talking.

Both loops run in the same two processes, one after the other in every round, on a transformer of
6.3 million parameters: with ten hooks, a gradient monitor and the record. Rank 0 writes the times
as JSON. Run alone by `python -m bench --only several_processes`; each rank has one thread, so the
machine needs two free cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import hookline
from bench.harness import Candidate, Row, Spread, interleave
from bench.monitors import make_batch, make_model
from bench.raw import BeforeStep
from hookline.hooks.monitoring.gradient_monitor import GradientMonitor

__all__ = ["run"]

TEN, WARMUP = 10, 3


def run(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command = [*launch, "--standalone", "-m", "bench.several_processes", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "quick" if quick else "full"], check=True, env=environment)
        times = json.loads(out.read_text())
    rows = []
    for name, limit in {"ddp": 1.03, "fsdp": 1.05}.items():
        bare, trainer = times[f"bare {name}"], times[f"trainer {name}"]
        ratios = Spread.of([a / b for a, b in zip(trainer, bare, strict=True)])
        middle = sorted(bare)[len(bare) // 2] * 1e3
        text = "ten hooks, gradient monitor and record on two ranks, over a bare loop"
        note = f"bare {middle:.1f} ms per step"
        rows.append(Row(f"{name}, {text}", ratios, "×", limit=limit, note=note))
    noise = [a / b for a, b in zip(times["bare again"], times["bare ddp"], strict=True)]
    rows.append(Row("    the bare loop with DDP over itself (the noise)", Spread.of(noise), "×"))
    for name in ("any", "report"):
        spread = Spread.of(times[name]).scaled(1e6)
        rows.append(Row(f"    {TALK[name]}, two ranks", spread, "µs"))
    return rows


TALK = {
    "any": "one agreement on requests (every step)",
    "report": "one report of 50 steps (every 50 steps)",
}


# -- in each of the two processes -----------------------------------------------------------------


def _measure(out: Path, *, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps, rounds = (5, 3) if quick else (20, 12)
    candidates: dict[str, Candidate] = {
        "bare ddp": partial(_bare, "ddp", steps),
        "bare again": partial(_bare, "ddp", steps),
        "trainer ddp": partial(_trainer, "ddp", steps),
        "bare fsdp": partial(_bare, "fsdp", steps),
        "trainer fsdp": partial(_trainer, "fsdp", steps),
        **_talking(),
    }
    measured = interleave(candidates, rounds=rounds, warmup=1)  # in the same order in both ranks
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured.seconds))
    dist.destroy_process_group()


class _Timed:
    """One batch again and again; it keeps the time between the warm-up and the end."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        batch = make_batch()
        for _ in range(WARMUP):
            yield batch
        begin = perf_counter()
        for _ in range(self.steps):
            yield batch
        self.seconds = (perf_counter() - begin) / self.steps
        yield batch

    def __len__(self) -> int:
        return WARMUP + self.steps + 1


def _bare(strategy: str, steps: int) -> float:
    model: Any = make_model()
    called = _shard(model) if strategy == "fsdp" else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = _Timed(steps)
    for inputs, targets in batches:
        loss = mse_loss(called(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return batches.seconds


def _shard(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in _layers(model):
        fully_shard(layer)
    return fully_shard(model)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]


def _trainer(strategy: str, steps: int) -> float:
    batches = _Timed(steps)
    with tempfile.TemporaryDirectory() as folder:
        config: Any = {
            "strategy": strategy,
            "fsdp": {"wrap": ["TransformerEncoderLayer"]},
            "shard_loaders": False,
            "runs": folder,
            "progress": "off",
        }
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        hooks: list[Any] = [BeforeStep() for _ in range(TEN)]
        hooks.append(GradientMonitor(log_frequency=10))
        trainer = hookline.Trainer(config, model, optimizer, loss_fn=mse_loss, hooks=hooks)
        trainer.fit(batches)
    return batches.seconds


def _talking() -> dict[str, Candidate]:
    from hookline.loop.processes import ProcessGroup
    from hookline.loop.step_records import StepRecords

    processes = ProcessGroup(started_here=False)
    records = StepRecords(processes)

    def report() -> None:
        for step in range(50):
            records.add(step, 0, "train/loss", 0.5)
        records.report(None)

    flags = (False,) * 5
    return {
        "any": partial(_repeat, lambda: processes.any(*flags), 200),
        "report": partial(_repeat, report, 20),
    }


def _repeat(function: Callable[[], Any], times: int) -> float:
    begin = perf_counter()
    for _ in range(times):
        function()
    return (perf_counter() - begin) / times


if __name__ == "__main__":
    _measure(Path(sys.argv[1]), quick=sys.argv[2] == "quick")
