"""Saving 454 MB of model and AdamW state: blocked time, time to durable, training lost, memory.

Disks and shared machines are noisy: everything is measured in rounds, each save is compared with
a copy and a raw write of the same bytes that ran right before it, and medians of these ratios are
reported.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from bench.checkpoint_peers import SAVERS, HooklineSaver, Saver, State, make_savers
from bench.harness import Row, Spread

__all__ = ["run"]

_CHUNK = 1 << 22
_BASELINE_SECONDS = 1.0

Samples = dict[str, list[float]]


def run(*, quick: bool) -> list[Row]:
    savers, missing = make_savers()
    for name, reason in missing.items():
        print(f"{name} is skipped: {reason}", file=sys.stderr)
    state = _make_state()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        saves = _SaveBench(state, Path(folder), savers)
        rows = saves.rows(rounds=3 if quick else 11)
        rows += _training_rows(state, Path(folder), savers, rounds=3 if quick else 7)
    for saver in savers.values():
        saver.close()
    return rows + _memory_rows(list(savers))


# -- the state ------------------------------------------------------------------------------------


def _make_state() -> State:
    """Return the state of a transformer with 12 layers of width 512 after a step: 454 MB."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in _tensors_of(part)]


# -- blocked time and time to durable -------------------------------------------------------------


class _SaveBench:
    def __init__(self, state: State, folder: Path, savers: dict[str, Saver]) -> None:
        self._state, self._folder, self._savers = state, folder, savers
        self._tensors = _tensors_of(state)
        self._buffers = [torch.zeros_like(tensor) for tensor in self._tensors]
        self._bytes = bytes(sum(tensor.nbytes for tensor in self._tensors))
        self._blocked: Samples = defaultdict(list)
        self._durable: Samples = defaultdict(list)
        self._first: list[float] = []
        self._copies: list[float] = []
        self._writes: list[float] = []

    def rows(self, *, rounds: int) -> list[Row]:
        names = list(self._savers)
        for i in range(rounds + 1):
            random.Random(i).shuffle(names)
            for name in names:
                self._measure(name, counts=i > 0)
            self._measure_first(counts=i > 0)
        peers = [name for name in SAVERS if name in self._savers and name != "hookline"]
        return [
            Row(
                "a save blocks training, over a copy of the state",
                Spread.of(self._blocked["hookline"]),
                "×",
                limit=1.3,
                peers={name: _ratio(self._blocked[name]) for name in peers},
                note=f"copying {len(self._bytes) / 1e6:.0f} MB: {_seconds(self._copies)}",
            ),
            Row(
                "    the first save, after prepare()",
                Spread.of(self._first),
                "×",
                limit=2,
            ),
            Row(
                "from save to durable, over a raw write with sync",
                Spread.of(self._durable["hookline"]),
                "×",
                limit=1.5,
                peers={
                    name + ("" if self._savers[name].is_durable else " (not synced)"): _ratio(
                        self._durable[name]
                    )
                    for name in peers
                },
                note=f"writing the same bytes raw: {_seconds(self._writes)}",
            ),
        ]

    def _measure(self, name: str, *, counts: bool) -> None:
        path = self._folder / "checkpoint"
        saver = self._savers[name]
        write = self._write()
        gc.collect()
        copy = self._copy()
        begin = perf_counter()
        saver.start(self._state, path)
        blocked = perf_counter() - begin
        saver.finish()
        durable = perf_counter() - begin
        _remove(self._folder)
        if counts:
            self._blocked[name].append(blocked / copy)
            self._durable[name].append(durable / write)

    def _measure_first(self, *, counts: bool) -> None:
        saver = HooklineSaver()
        saver.prepare(self._state)
        copy = self._copy()
        begin = perf_counter()
        saver.start(self._state, self._folder / "checkpoint")
        blocked = perf_counter() - begin
        saver.finish()
        saver.close()
        _remove(self._folder)
        if counts:
            self._first.append(blocked / copy)

    def _copy(self) -> float:
        begin = perf_counter()
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            buffer.copy_(tensor)
        self._copies.append(perf_counter() - begin)
        return self._copies[-1]

    def _write(self) -> float:
        data = memoryview(self._bytes)
        begin = perf_counter()
        handle = os.open(self._folder / "raw", os.O_WRONLY | os.O_CREAT)
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            while chunk:
                chunk = chunk[os.write(handle, chunk) :]
        os.fsync(handle)
        os.close(handle)
        self._writes.append(perf_counter() - begin)
        _remove(self._folder)
        return self._writes[-1]


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# -- training during the write --------------------------------------------------------------------


def _training_rows(
    state: State, folder: Path, savers: dict[str, Saver], *, rounds: int
) -> list[Row]:
    names = [name for name in savers if name not in ("torch.save", "dcp.save")]  # block anyway
    cores = os.cpu_count() or 1
    rows: list[Row] = []
    for threads, limit in ((max(1, cores // 2), 5), (cores, 15)):
        lost: Samples = defaultdict(list)
        writes: Samples = defaultdict(list)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        training = _Training()
        for i in range(rounds + 1):
            random.Random(i).shuffle(names)
            for name in names:
                share, seconds = _measure_training(training, savers[name], state, folder)
                if i > 0:
                    lost[name].append(100 * share)
                    writes[name].append(seconds)
        torch.set_num_threads(before)
        rows.append(
            Row(
                f"training lost during the write, on {threads} of {cores} cores",
                Spread.of(lost["hookline"]),
                "%",
                limit=limit,
                peers={
                    name: f"{Spread.of(lost[name]).median:.0f} % of {_seconds(writes[name])}"
                    for name in SAVERS
                    if name in lost and name != "hookline"
                },
                note=f"the write takes {_seconds(writes['hookline'])}",
            )
        )
    return rows


class _Training:
    """A training whose steps take about 10 ms."""

    def __init__(self) -> None:
        self._model = nn.Sequential(
            nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1)
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(128, 512)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def rate(self, seconds: float) -> float:
        """Return the steps per second."""
        begin, steps = perf_counter(), 0
        while perf_counter() - begin < seconds:
            self.step()
            steps += 1
        return steps / (perf_counter() - begin)


def _measure_training(
    training: _Training, saver: Saver, state: State, folder: Path
) -> tuple[float, float]:
    """Return the share of training time that the write takes, and how long it takes."""
    before = training.rate(_BASELINE_SECONDS)
    saver.start(state, folder / "checkpoint")
    is_finished = saver.watch()
    begin, steps = perf_counter(), 0
    while not is_finished():
        training.step()
        steps += 1
    seconds = perf_counter() - begin
    after = training.rate(_BASELINE_SECONDS)
    _remove(folder)
    return 1 - steps / seconds / ((before + after) / 2), seconds


# -- memory ---------------------------------------------------------------------------------------


def _memory_rows(names: list[str]) -> list[Row]:
    if not Path("/proc/self/clear_refs").exists():
        return []
    measured = {name: _memory_of(name) for name in names}
    return [
        Row(
            "extra memory at the peak, over the state",
            Spread.of([measured["hookline"]]),
            "×",
            limit=1.02,  # one copy, and the header
            peers={
                name: f"{value:.2f} ×" for name, value in measured.items() if name != "hookline"
            },
            note="of the training process; 'process' savers need memory of their own beside it",
        )
    ]


def _memory_of(name: str) -> float:
    command = [sys.executable, "-m", "bench.checkpoints", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Measuring the memory of {name} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def _print_memory(name: str) -> None:
    """Print the largest growth of this process during two saves, over the size of the state."""
    state = _make_state()
    saver = SAVERS[name][1]()
    small = {"model": {"w": torch.ones(4)}, "optimizer": {"state": {}, "param_groups": []}}
    with tempfile.TemporaryDirectory() as folder:
        saver.start(small, Path(folder) / "small")  # imports and threads are not counted
        saver.finish()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = _status("VmRSS")
        for i in range(2):
            saver.start(state, Path(folder) / str(i))
            saver.finish()
        grown = _status("VmHWM") - before
    saver.close()
    print(grown / sum(tensor.nbytes for tensor in _tensors_of(state)), flush=True)
    os._exit(0)  # process groups and helper processes would otherwise wait for each other


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def _ratio(values: list[float]) -> str:
    return f"{Spread.of(values).median:.1f} ×"


def _seconds(values: list[float]) -> str:
    return f"{Spread.of(values).median:.2f} s"


if __name__ == "__main__":
    _print_memory(sys.argv[1])
