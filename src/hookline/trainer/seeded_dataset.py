"""Samples whose random numbers do not depend on the process that loads them, nor on others."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from hookline.loop.random_state import random_state, restore_random_state

__all__ = ["SeededDataset", "add_seeds"]

_CPU = torch.device("cpu")


class SeededIndex(NamedTuple):
    """An index and what its seed is made from. It travels to workers, which keep their dataset."""

    seed_key: tuple[int, ...]
    index: Any


def add_seeds(indices: Iterable[Any], seed_key: tuple[int, ...] | None) -> Iterator[Any]:
    """Return the indices with their seeds, for a `SeededDataset`; as they are without a key."""
    if seed_key is None:
        return iter(indices)
    return (SeededIndex(seed_key, index) for index in indices)


class SeededDataset(Dataset[Any]):
    """A map-style dataset that seeds Python, numpy and torch before each sample.

    The random numbers of the training process are the same afterwards.
    """

    def __init__(self, dataset: Any, *, batched: bool) -> None:
        self.dataset = dataset
        self._batched = batched

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: SeededIndex) -> Any:
        return self._load(index.seed_key, [index.index])[0]

    def __getitems__(self, batch: SeededIndex) -> list[Any]:
        return self._load(batch.seed_key, batch.index)

    def _load(self, seed_key: tuple[int, ...], indices: Sequence[Any]) -> list[Any]:
        if get_worker_info() is not None:
            return [self._load_one(seed_key, index) for index in indices]
        state = random_state(_CPU)
        try:
            return [self._load_one(seed_key, index) for index in indices]
        finally:
            restore_random_state(state, _CPU)

    def _load_one(self, seed_key: tuple[int, ...], index: Any) -> Any:
        _seed(seed_key, index)
        load_several = getattr(self.dataset, "__getitems__", None)
        if self._batched and load_several:
            return load_several([index])[0]
        return self.dataset[index]


def _seed(seed_key: tuple[int, ...], index: Any) -> None:
    index = int(index) if hasattr(index, "__index__") else index
    digest = hashlib.blake2b(repr((*seed_key, index)).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
