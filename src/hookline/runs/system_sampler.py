"""Samples what the process and the machine use, in a thread of its own.

Neither the training thread nor a device waits for it. What an operating system does not tell is
left out: without Linux's `/proc`, the machine's CPU and memory, and disk traffic.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from hookline.tensors.memory import resident_mb

SECONDS = 10.0
"""How often the system is sampled, unless `HOOKLINE_SAMPLE_SECONDS` says otherwise."""

log = logging.getLogger("hookline")


class SystemSampler:
    """Takes a sample every few seconds, until it is stopped.

    Args:
        folder: whose disk is looked at.
        device: where the model is trained; None or a CPU: no accelerator is looked at.

    Attributes:
        sample: the newest values by name that nobody has taken; None if there are none.
    """

    def __init__(self, folder: Path, device: torch.device | None) -> None:
        self.sample: dict[str, float] | None = None
        self._stopped = threading.Event()
        self._seconds = _read_seconds()
        self._usage = SystemUsage(folder, device)
        self._thread = threading.Thread(target=self._run, name="hookline-system", daemon=True)
        if self._seconds > 0:
            self._thread.start()

    def _run(self) -> None:
        self._usage.read()  # here: a disk or a device may take long to respond
        while not self._stopped.wait(self._seconds):
            self.sample = self._usage.read()

    def take(self) -> dict[str, float]:
        """Return the newest values, once."""
        sample, self.sample = self.sample, None
        return sample or {}

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)  # a disk that does not respond may keep it


class SystemUsage:
    """Reads what the process and the machine use, and the disk of a folder."""

    def __init__(self, folder: Path, device: torch.device | None) -> None:
        self._folder = folder
        self._device = device
        self._counters: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return the values by name; those of counters are since the last time."""
        values: dict[str, float] = {}
        for read in (self._cpu, _memory, self._disk, self._disk_traffic, self._accelerator):
            with suppress(Exception):  # a container or another system may not tell
                values.update(read())
        return values

    def _since(self, name: str, value: float) -> float | None:
        """Return how much a counter has grown since the last time; None the first time."""
        before, self._counters[name] = self._counters.get(name), value
        return None if before is None else max(0.0, value - before)

    def _cpu(self) -> Iterator[tuple[str, float]]:
        times = os.times()
        wall = self._since("wall", monotonic())
        used = self._since("cpu", times.user + times.system)
        if wall and used is not None:
            yield "system/cpu_percent", 100 * used / wall
        busy, total = _machine_times()
        grown = self._since("busy", busy), self._since("total", total)
        if grown[0] is not None and grown[1]:
            yield "system/machine_cpu_percent", 100 * grown[0] / grown[1]

    def _disk(self) -> Iterator[tuple[str, float]]:
        yield "system/disk_free_gb", shutil.disk_usage(self._folder).free / 1e9

    def _disk_traffic(self) -> Iterator[tuple[str, float]]:
        counters = _read_sizes("/proc/self/io")
        for name, counter in (("read", "read_bytes:"), ("written", "write_bytes:")):
            if (grown := self._since(name, counters[counter] / 1e6)) is not None:
                yield f"system/disk_{name}_mb", grown

    def _accelerator(self) -> Iterator[tuple[str, float]]:
        """Yield what is used of the device, as far as its module in torch tells."""
        device = self._device
        if device is None or device.type in ("cpu", "meta"):
            return
        module: Any = getattr(torch, device.type)
        name = f"system/{device.type}:{device.index or 0}"
        if device.type == "mps":
            yield f"{name}/memory_mb", module.driver_allocated_memory() / 1e6
            return
        free, total = module.mem_get_info(device)
        yield f"{name}/memory_mb", (total - free) / 1e6
        yield f"{name}/memory_percent", 100 * (1 - free / total)
        # For CUDA, this needs the package of NVIDIA's management library.
        yield f"{name}/utilization_percent", float(module.utilization(device))


def _read_seconds() -> float:
    """Return how often the system is sampled; 0 for never."""
    text = os.environ.get("HOOKLINE_SAMPLE_SECONDS", "")
    with suppress(ValueError):
        if 0 <= (seconds := float(text or SECONDS)) < threading.TIMEOUT_MAX:
            return seconds
    log.warning("HOOKLINE_SAMPLE_SECONDS is %r; expected a number of seconds, or 0.", text)
    return SECONDS


def _machine_times() -> tuple[float, float]:
    """Return the time of all cores in which they worked, and all their time."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(text) for text in first.split()[1:9]]
    idle = ticks[3] + ticks[4]  # the second waits for disks
    return float(sum(ticks) - idle), float(sum(ticks))


def _memory() -> Iterator[tuple[str, float]]:
    yield "system/memory_mb", resident_mb()
    sizes = _read_sizes("/proc/meminfo")
    free = sizes["MemAvailable:"] / sizes["MemTotal:"]
    yield "system/machine_memory_percent", 100 * (1 - free)


def _read_sizes(file: str) -> dict[str, int]:
    lines = [line.split() for line in Path(file).read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines}
