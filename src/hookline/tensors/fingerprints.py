"""Fingerprints of tensors, to notice any change of their memory.

They depend on bits, not on values, so a NaN equals itself and `0.0` differs from `-0.0`. Memory of
the CPU is hashed with xxh3. Other devices compute a sum that depends on the position of each word;
it stays on the device, so that nothing waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from torch import Tensor

from hookline.tensors.memory import storages
from hookline.tensors.timing import is_over, record_time

_PIECE = 1 << 22  # words hashed at once on a device
_FACTOR, _OFFSET = 0x9E3779B97F4A7C15 - (1 << 64), 0x632BE59BD9B4E019


class Fingerprint:
    """The bits of the memory that tensors share, at the time of the call."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.on_cpu: list[int] = []
        self.on_devices: list[Tensor] = []
        for _, storage in storages(tensors).values():
            if isinstance(storage, Tensor):
                continue  # a layout without access to its memory
            if _is_on_cpu(storage):
                memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
                self.on_cpu.append(xxhash.xxh3_64_intdigest(memory))
            else:
                content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self.on_devices.append(_hash_on_device(content))


class Comparison:
    """The comparison of two fingerprints of the same tensors; a device's result comes later."""

    @torch.no_grad()
    def __init__(self, before: Fingerprint, after: Fingerprint) -> None:
        pairs = list(zip(before.on_devices, after.on_devices, strict=False))
        is_resized = len(before.on_devices) != len(after.on_devices)
        self.differs_on_cpu = is_resized or before.on_cpu != after.on_cpu
        self._flags = [(a != b).to("cpu", non_blocking=True) for a, b in pairs]
        self._ends = [record_time(device) for device in {a.device for a, _ in pairs}]

    @property
    def is_pending(self) -> bool:
        """Whether a device has not yet computed its result."""
        return not all(map(is_over, self._ends))

    @property
    def differs_on_devices(self) -> bool:
        """Whether memory of a device has changed."""
        return any(bool(flag) for flag in self._flags)


def _is_on_cpu(storage: Any) -> bool:
    return bool(storage.device.type == "cpu")


@torch.no_grad()
def _hash_on_device(content: Tensor) -> Tensor:
    """Return a hash of bytes as a tensor with one integer."""
    split = content.numel() - content.numel() % 8
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    start = 0
    for part in (content[:split].view(torch.int64), content[split:].to(torch.int64)):
        for words in torch.split(part, _PIECE):
            positions = torch.arange(start, start + len(words), device=content.device)
            mixed = (words ^ (words >> 32)) * ((positions * _FACTOR + _OFFSET) | 1)
            total += (mixed ^ (mixed >> 32)).sum()
            start += len(words)
    return total
