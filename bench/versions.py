"""Compare the speed of two versions of Hookline, which need not be installed.

    git worktree add /tmp/old <commit>
    python -m bench.versions /tmp/old/src src --rounds 15

Each version has processes of its own, which wait for work. In each round every workload runs in
both, one right after the other, in an order that changes from round to round. A row has the medians
of both versions, the quartiles of the old one, and the median of the rounds' ratios. Workloads use
public names only, since those are what two versions have in common.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import socket
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

from bench.harness import Spread

ROOT = Path(__file__).parent.parent
STEPS, WARMUP = 300, 60
MICRO, MILLI = (1e6, "µs"), (1e3, "ms")


def main() -> None:
    if "BENCH_RANKS" in os.environ:
        _serve(int(os.environ["BENCH_RANKS"]))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("old", type=Path, help="the folder with the old `hookline` package")
    parser.add_argument("new", type=Path, help="the folder with the new one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="workloads whose names contain this")
    given = parser.parse_args()
    for folder in (given.old, given.new):
        if not (folder / "hookline" / "__init__.py").is_file():
            parser.error(f"{folder} has no package `hookline`.")
    names = [name for name in WORKLOADS if given.only is None or given.only in name]
    if not names:
        parser.error(f"No workload has {given.only!r} in its name. There are {list(WORKLOADS)}.")
    sources = {"old": given.old.resolve(), "new": given.new.resolve()}
    with tempfile.TemporaryDirectory() as folder:
        _show(names, _measure(sources, names, given.rounds, folder))


def _measure(
    sources: dict[str, Path], names: list[str], rounds: int, folder: str
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by workload and version."""
    seconds = {name: {version: [] for version in sources} for name in names}
    sizes = sorted({_ranks(name) for name in names})
    workers = {(v, n): _Worker(s, n, folder) for v, s in sources.items() for n in sizes}
    shuffle = random.Random(0).shuffle
    try:
        for i in range(rounds + 1):  # the first round is not counted
            print(f"round {i} of {rounds}", file=sys.stderr, flush=True)
            for name in names:
                versions = list(sources)
                shuffle(versions)
                for version in versions:
                    spent = workers[version, _ranks(name)].run(name)
                    if i:
                        seconds[name][version].append(spent)
    finally:
        for worker in workers.values():
            worker.end()
    return seconds


def _show(names: list[str], seconds: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'workload':44} {'old':>9} {'quartiles':>19} {'new':>9}      {'new / old':>9}")
    for name in names:
        old, new = seconds[name]["old"], seconds[name]["new"]
        factor, unit = WORKLOADS[name][1]
        spread = Spread.of(old).scaled(factor)
        own = median(new) * factor
        ratio = median(b / a for a, b in zip(old, new, strict=True))
        within = "slower" if own > spread.high else "faster" if own < spread.low else "within"
        quartiles = f"{spread.low:.1f}–{spread.high:.1f}"
        print(
            f"{name:44} {spread.median:9.1f} {quartiles:>19} {own:9.1f} {unit}   {ratio:9.3f} "
            f"({within} the old quartiles)"
        )


def _ranks(workload: str) -> int:
    return 2 if "ranks" in workload else 1


class _Worker:
    """The processes of one version: one, or two ranks of which the first gets the commands."""

    def __init__(self, source: Path, ranks: int, folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
                "OMP_NUM_THREADS": "1",
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                **{"BENCH_RANKS": str(ranks), "BENCH_FOLDER": folder},
            }
            if ranks == 1:
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                    del environment[name]
            command = [sys.executable, "-m", "bench.versions"]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if rank == 0 else {}
            self._processes.append(
                subprocess.Popen(command, env=environment, text=True, cwd="/", **pipes)
            )

    def run(self, name: str) -> float:
        first = self._processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        print(name, file=first.stdin, flush=True)
        while line := first.stdout.readline():
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit(f"The process for '{name}' has ended: see above.")

    def end(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            process.wait()


# -- in the processes of a version ----------------------------------------------------------------


def _serve(ranks: int) -> None:
    """Run the workloads whose names come as lines, and print the seconds of each."""
    import torch
    import torch.distributed as dist

    import hookline

    source = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(hookline.__file__).is_relative_to(source)  # the version that is meant
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
    is_first = ranks == 1 or dist.get_rank() == 0
    while True:
        name = [sys.stdin.readline().strip() if is_first else ""]
        if ranks > 1:
            dist.broadcast_object_list(name, src=0)
        if not name[0]:
            break
        gc.collect()
        spent = WORKLOADS[name[0]][0]()
        if is_first:
            print("seconds", spent, flush=True)
    if ranks > 1:
        dist.destroy_process_group()


class _Clock:
    """Batches, and the seconds per batch after the first ones, which warm up."""

    def __init__(self, batch: Any, steps: int = STEPS, warmup: int = WARMUP) -> None:
        self._batch, self._steps, self._warmup = batch, steps, warmup
        self.seconds = 0.0

    def __len__(self) -> int:
        return self._warmup + self._steps + 1

    def __iter__(self) -> Iterator[Any]:
        yield from repeat(self._batch, self._warmup)
        begin = perf_counter()
        yield from repeat(self._batch, self._steps)
        self.seconds = (perf_counter() - begin) / self._steps
        yield self._batch  # some loops do not ask for one more


def _small() -> tuple[Any, Any, Any]:
    """Return a small model, its optimizer and a batch."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), batch


def _large() -> tuple[Any, Any, Any]:
    """Return a transformer of 6.3 million parameters, its optimizer and a batch."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    batch = torch.randn(4, 32, 256), torch.randn(4, 32, 256)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch


def _hooks(count: int) -> list[Any]:
    import hookline

    class Nothing(hookline.Hook):
        def on_before_optimizer_step(self) -> None: ...

        def on_step_end(self, step: int) -> None: ...

    return [Nothing() for _ in range(count)]


def _dispatch() -> float:
    import hookline

    runner = hookline.HookRunner(_hooks(10))
    context = hookline.StepContext(
        step=1, loss=0.5, grad_norm=1.0, lr=0.1, tokens_seen=0, model=None, optimizer=None
    )
    for _ in range(2_000):
        runner.on_step_end(context)
    begin = perf_counter()
    for _ in repeat(None, 20_000):
        runner.on_step_end(context)
    return (perf_counter() - begin) / 20_000


def _train_bare(model: Any, optimizer: Any, batches: Any) -> None:
    from torch.nn.functional import mse_loss

    for inputs, targets in batches:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


def _bare_loop(hooks: Callable[[], list[Any]], make: Any = _small, steps: int = STEPS) -> float:
    import hookline

    model, optimizer, batch = make()
    clock = _Clock(batch, steps, WARMUP if steps == STEPS else 5)
    with (
        _folder() as folder,
        hookline.attach(model, optimizer, hooks=hooks(), runs=folder, report=False),
    ):
        _train_bare(model, optimizer, clock)
    return clock.seconds


def _reads_everything() -> list[Any]:
    import hookline

    class Reader(hookline.Hook):
        def on_step_end(self, step: int, loss: float, grad_norm: float, lr: float) -> None: ...

    return [Reader()]


def _trainer(
    hooks: Callable[[], list[Any]], make: Any = _small, steps: int = STEPS, **config: Any
) -> float:
    from torch.nn.functional import mse_loss

    import hookline

    model, optimizer, batch = make()
    clock = _Clock(batch, steps, WARMUP if steps == STEPS else 5)
    with _folder() as folder:
        config = {"runs": folder, "progress": "off", "report": False, **config}
        hookline.Trainer(config, model, optimizer, loss_fn=mse_loss, hooks=hooks()).fit(clock)
    return clock.seconds


def _monitors() -> list[Any]:
    import hookline

    return [hookline.GradientMonitor(log_frequency=10), hookline.LRMonitor(), *_hooks(10)]


def _capture() -> float:
    import torch

    import hookline

    model, _, (inputs, _) = _large()
    with torch.no_grad(), hookline.probe(model, "layers.*", memory_limit_mb=256) as probe:
        for _ in range(3):
            model(inputs)
        begin = perf_counter()
        for _ in range(10):
            model(inputs)
        spent = perf_counter() - begin
    del probe
    return spent / 10


def _save() -> float:
    import hookline

    model, optimizer, batch = _large()
    with (
        _folder() as folder,
        hookline.attach(model, optimizer, hooks=[], runs=folder, report=False) as session,
    ):
        _train_bare(model, optimizer, [batch])
        session.save_checkpoint(wait=True)
        begin = perf_counter()
        for _ in range(3):
            _train_bare(model, optimizer, [batch])
            session.save_checkpoint(wait=True)
        return (perf_counter() - begin) / 3


def _hugging_face() -> float:
    import torch
    import transformers

    import hookline

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _small()[0]

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}

    inputs, targets = torch.randn(8), torch.randn(8)
    data = [{"x": inputs, "labels": targets}] * (2 * STEPS)
    with _folder() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            **{"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True},
            logging_strategy="no",
        )
        trainer = transformers.Trainer(Model(), arguments, train_dataset=data)
        with hookline.attach(trainer, hooks=_hooks(10)):
            begin = perf_counter()
            trainer.train()
            return (perf_counter() - begin) / STEPS


def _lightning() -> float:
    import logging
    import warnings

    import lightning
    import torch

    import hookline

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _small()[0]

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    clock = _Clock(_small()[2])
    with _folder() as folder:
        off: Any = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **off)
        with hookline.attach(trainer, hooks=_hooks(10)):
            trainer.fit(Module(), clock)
    return clock.seconds


def _ignite() -> float:
    from ignite.engine import create_supervised_trainer
    from torch.nn.functional import mse_loss

    import hookline

    model, optimizer, batch = _small()
    engine, clock = create_supervised_trainer(model, optimizer, mse_loss), _Clock(batch)
    with hookline.attach(engine, model=model, optimizer=optimizer, hooks=_hooks(10)):
        engine.run(clock, max_epochs=1)
    return clock.seconds


def _two_ranks(strategy: str) -> float:
    config: dict[str, Any] = {"strategy": strategy, "shard_loaders": False}
    if strategy == "fsdp":
        config["fsdp"] = {"wrap": ["TransformerEncoderLayer"]}
    return _trainer(_monitors, _large, 20, **config)


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=os.environ["BENCH_FOLDER"])


WORKLOADS: dict[str, tuple[Callable[[], float], tuple[float, str]]] = {
    "dispatch: ten hooks": (_dispatch, MICRO),
    "bare loop: a run, no hook": (partial(_bare_loop, list), MICRO),
    "bare loop: a run, ten hooks": (partial(_bare_loop, partial(_hooks, 10)), MICRO),
    "bare loop: reads loss, norm and lr": (partial(_bare_loop, _reads_everything), MICRO),
    "trainer: a run, no hook": (partial(_trainer, list), MICRO),
    "trainer: a run, ten hooks": (partial(_trainer, partial(_hooks, 10)), MICRO),
    "trainer: ten hooks, monitors, 6.3 M": (partial(_trainer, _monitors, _large, 15), MILLI),
    "Hugging Face: ten hooks": (_hugging_face, MICRO),
    "Lightning: ten hooks": (_lightning, MICRO),
    "Ignite: ten hooks": (_ignite, MICRO),
    "capture of 8 layers": (_capture, MILLI),
    "save of 6.3 M parameters with AdamW": (_save, MILLI),
    "DDP, two ranks: ten hooks, monitors": (partial(_two_ranks, "ddp"), MILLI),
    "FSDP2, two ranks: ten hooks, monitors": (partial(_two_ranks, "fsdp"), MILLI),
}


if __name__ == "__main__":
    main()
