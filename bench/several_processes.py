"""The trainer on two ranks over plain DDP and plain FSDP2 in a bare loop, and the cost of talking.

Both loops run in the same two processes, a few steps of one and then a few of the other: the loader
of the trainer runs the bare loop between two of its batches. They train a transformer of 6.3
million parameters, with ten hooks, a gradient monitor and the record. A round has 50 steps of each,
so that it contains everything that happens at times, and its ratio is that of the sums. Each rank
has one thread, so the machine needs two free cores.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import hookline
from bench.harness import Candidate, Row, Spread, interleave, interval_of_median
from bench.monitors import make_batch, make_model
from bench.raw import BeforeStep
from hookline.hooks.monitoring.gradient_monitor import GradientMonitor

__all__ = ["run"]

TEN, WARMUP, BLOCK = 10, 5, 5  # hooks; steps
SECONDS = 300.0  # per strategy; a slow machine has fewer rounds
LIMITS = {"ddp": 1.03, "fsdp": 1.05}


def run(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command = [*launch, "--standalone", "-m", "bench.several_processes", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "quick" if quick else "full"], check=True, env=environment)
        times = json.loads(out.read_text())
    text = "ten hooks, gradient monitor and record on two ranks, over a bare loop"
    rows = [_compare(times[name], f"{name}, {text}", limit) for name, limit in LIMITS.items()]
    noise = {**times["ddp"], "trainer": times["ddp"]["again"]}
    rows.append(_compare(noise, "    the bare loop with DDP over itself (the noise)"))
    for name in TALK:
        spread = Spread.of(times["talk"][name]).scaled(1e6)
        rows.append(Row(f"    {TALK[name]}, two ranks", spread, "µs"))
    return rows


def _compare(times: dict[str, list[float]], text: str, limit: float | None = None) -> Row:
    pairs = zip(times["trainer"], times["bare"], strict=True)
    ratios = [a / b for a, b in pairs]
    low, high = interval_of_median(ratios)
    step = median(times["bare"]) * 1e3
    note = f"{len(ratios)} rounds, bare {step:.1f} ms per step; 95 %: {low:.3f}–{high:.3f}"
    return Row(text, Spread.of(ratios), "×", limit=limit, note=note)


TALK = {
    "any": "one agreement on requests (every step)",
    "report": "one report of 50 steps (every 50 steps)",
}


# -- in each of the two processes -----------------------------------------------------------------


def _measure(out: Path, *, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds, steps = (2, 10) if quick else (16, 50)
    times: dict[str, Any] = {name: _measure_strategy(name, rounds, steps) for name in LIMITS}
    talk = interleave(_talking(), rounds=5, warmup=1)  # in the same order in both ranks
    times["talk"] = talk.seconds
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times))
    dist.destroy_process_group()


def _measure_strategy(strategy: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds per step of each round, by loop, of the slower rank."""
    bare = {"bare": _bare_loop(strategy)}
    if strategy == "ddp":
        bare["again"] = _bare_loop(strategy)
    batches = _Batches(bare, rounds, steps)
    _train(strategy, batches)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, batches.seconds)
    return {
        name: [max(both) for both in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in batches.seconds
    }


class _Batches:
    """The batches of the trainer; between some of them, the bare loops take their steps.

    Args:
        bare: the bare loops by name; each `next` is one step.
        rounds: how many rounds are measured at most, after some steps that are not.
        steps: the steps of each loop in a round.
    """

    def __init__(self, bare: dict[str, Iterator[Any]], rounds: int, steps: int) -> None:
        self._bare = bare
        self._rounds, self._steps = rounds, steps
        self.stop: Callable[[str], None]
        self.seconds: dict[str, list[float]] = {name: [] for name in (*bare, "trainer")}

    def __len__(self) -> int:
        return WARMUP + self._rounds * self._steps + 1

    def __iter__(self) -> Iterator[Any]:
        batch, shuffle = make_batch(), random.Random(0).shuffle
        for loop in self._bare.values():
            _take(loop, WARMUP)
        yield from repeat(batch, WARMUP)
        gc.collect()
        gc.freeze()
        end = perf_counter() + SECONDS
        for _ in range(self._rounds):
            spent = dict.fromkeys(self.seconds, 0.0)
            for _ in range(self._steps // BLOCK):
                order = list(spent)
                shuffle(order)  # the same in both ranks
                for name in order:
                    gc.collect()
                    gc.disable()
                    dist.barrier()
                    begin = perf_counter()
                    if name == "trainer":
                        yield from repeat(batch, BLOCK)
                    else:
                        _take(self._bare[name], BLOCK)
                    spent[name] += perf_counter() - begin
                    gc.enable()
            for name, seconds in spent.items():
                self.seconds[name].append(seconds / self._steps)
            if _is_over(end):
                self.stop("the time is over")
                break
        gc.unfreeze()
        yield batch


def _is_over(end: float) -> bool:
    """Return whether rank 0's clock has passed this time."""
    over = torch.tensor(perf_counter() > end)
    dist.broadcast(over, src=0)
    return bool(over)


def _take(loop: Iterator[Any], steps: int) -> None:
    for _ in range(steps):
        next(loop)


def _bare_loop(strategy: str) -> Iterator[None]:
    model: Any = make_model()
    called = _shard(model) if strategy == "fsdp" else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for inputs, targets in repeat(make_batch()):
        loss = mse_loss(called(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def _shard(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in _layers(model):
        fully_shard(layer)
    return fully_shard(model)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]


def _train(strategy: str, batches: _Batches) -> None:
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
        batches.stop = trainer.stop
        trainer.fit(batches)


def _talking() -> dict[str, Candidate]:
    from hookline.loop.processes import ProcessGroup
    from hookline.loop.rank_sync import StepRecords

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
