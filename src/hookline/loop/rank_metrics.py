"""The throughput and the memory of each process, for the record."""

from __future__ import annotations

import sys
from time import monotonic

import torch

__all__ = ["RankMetrics"]

_SECONDS = 60.0  # between two records; the end of an epoch is always recorded


class RankMetrics:
    """Measures this process: batches per second, and the most memory that it has had.

    Args:
        rank: the number of this process.
        device: where it trains. On a CPU, the memory is that of the process.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._prefix = f"ranks/{rank}"
        self._device = device
        self._start(0)

    def _start(self, batches: int) -> None:
        self._batches, self._since = batches, monotonic()

    def start_epoch(self, batches: int) -> None:
        """Count from here, where so many batches of the epoch were trained on before."""
        self._start(batches)

    def measure(self, batches: int, *, is_last: bool = False) -> dict[str, float]:
        """Return the values since the last time by name; none if that was a short time ago.

        Args:
            batches: how many batches of the epoch were trained on.
            is_last: whether the epoch is over.
        """
        seconds = monotonic() - self._since
        trained = batches - self._batches
        if trained <= 0 or (seconds < _SECONDS and not is_last):
            return {}
        self._start(batches)
        values = {f"{self._prefix}/batches_per_second": trained / max(seconds, 1e-9)}
        peak = _peak_memory(self._device)
        return values if peak is None else {**values, f"{self._prefix}/memory_peak_mb": peak}


def _peak_memory(device: torch.device) -> float | None:
    of_device = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    if of_device is not None:
        return float(of_device(device)) / 1e6
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
