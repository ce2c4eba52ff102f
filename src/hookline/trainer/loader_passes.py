"""The passes over one loader: started, saved in the middle, and continued at the same batch.

| loader | is continued by |
|---|---|
| `DataLoader` with a map-style dataset | skipping indices; no data is loaded |
| with `state_dict` and `load_state_dict`: torchdata's `StatefulDataLoader` | its own state |
| anything else that can be iterated over | loading and dropping batches |

To skip indices, the sampler of a `DataLoader` is recorded. It decides its order with random
numbers: from the global generators, or from one of its own; when it is iterated over, or when the
first index is drawn. Recorded are therefore the random states at both moments, and how many indices
were drawn. To continue, the sampler is iterated over with these states, and the indices that were
drawn are skipped. With workers, more indices are drawn than batches were delivered: the last
indices are kept, so that those in between are exact for samplers that draw random numbers during
the pass, too.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from time import sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hookline.errors import CheckpointError
from hookline.loop.random_state import (
    generators_of,
    is_same_state,
    loader_random_state,
    random_state,
    restore_loader_random_state,
    restore_random_state,
)
from hookline.trainer.data_stream import length_of

log = logging.getLogger("hookline")
# Seconds between a collective and the fork of workers. A thread of gloo enters Python for a moment
# after the collective, and a process that is forked in that moment waits for ever (Python 3.11).
_SETTLING = 0.002
_CPU = torch.device("cpu")  # samplers draw nothing on other devices

SeedKey = tuple[int, ...] | None  # what the seeds of samples are made from


def make_passes(loader: Any, name: str, seed_key: SeedKey, *, fast_forward: bool) -> LoaderPasses:
    """Return the passes over a loader in an epoch, by what can be done with it.

    With `fast_forward`, batches are loaded again and dropped although indices could be skipped.
    """
    kind = DataLoaderPasses if skips_indices(loader) else LoaderPasses
    return kind(loader, name, seed_key, fast_forward=fast_forward)


def _saves_position(loader: Any) -> bool:
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's have a state if theirs has
    return hasattr(inner, "state_dict") and hasattr(loader, "load_state_dict")


def skips_indices(loader: Any) -> bool:
    """Return whether a loader is a `DataLoader` that iterates as torch's does."""
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return is_plain and not _saves_position(loader)


def number_of_samples(loader: Any) -> int | None:
    """Return the size of a map-style dataset in a DataLoader, None for other loaders."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    return None if dataset is None or isinstance(dataset, IterableDataset) else length_of(dataset)


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a DataLoader or its batch sampler, None where it is not known."""
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


class LoaderPasses:
    """Passes over any object with `__iter__` in an epoch, also one that saves its own position."""

    def __init__(
        self, loader: Any, name: str, seed_key: SeedKey = None, *, fast_forward: bool
    ) -> None:
        self.loader, self.name = loader, name
        self.draws_late = False  # whether a continued pass uses global random numbers as it goes
        self._seed_key, self._fast_forward = seed_key, fast_forward
        self._generators = generators_of([loader])
        self._start: dict[str, Any] | None = None  # the random states when the pass began
        self._ended: list[list[int]] = []  # of this epoch: length of passes, how many

    def start(self) -> Iterator[Any]:
        """Start a pass."""
        self._start = loader_random_state(self._generators)
        return iter(self.loader)

    def end(self, length: int) -> None:
        """End the pass, which had so many batches."""
        self._start = None
        if self._ended and self._ended[-1][0] == length:
            self._ended[-1][1] += 1
        else:
            self._ended.append([length, 1])

    def end_epoch(self) -> None:
        """End the epoch, also within a pass."""
        self._start = None
        self._ended = []

    def ended_lengths(self) -> Iterator[int]:
        """Iterate over the lengths of the passes that have ended."""
        return chain.from_iterable(repeat(length, times) for length, times in self._ended)

    def ended_batches(self) -> int:
        """Return the number of batches in the passes that have ended."""
        return sum(length * times for length, times in self._ended)

    def indices_of(self, batch_idx: int) -> Any:
        """Return the indices of a recent batch, by its number in the epoch; None if unknown."""
        return None

    # Saving and continuing.

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue in this epoch."""
        return {
            "pass": None if self._start is None else self._pass_dict(),
            "ended": [list(pair) for pair in self._ended],
            "persistent_workers": bool(getattr(self.loader, "persistent_workers", False)),
            "has_workers": self.has_workers,
            "worker_seed": self.worker_seed,
            "samples": number_of_samples(self.loader),
            "batch_size": batch_size_of(self.loader),
        }

    def _pass_dict(self) -> dict[str, Any]:
        own = {"loader": self.loader.state_dict()} if _saves_position(self.loader) else {}
        return {"start": self._start, **own}

    def restore_ended(self, saved: Mapping[str, Any]) -> None:
        """Restore the lengths of the passes that had ended."""
        self._ended = [list(pair) for pair in saved["ended"]]

    def continue_pass(
        self, saved: Mapping[str, Any], delivered: int
    ) -> Callable[[], Iterator[Any]]:
        """Go to where a pass was after so many batches; return a function that returns the rest.

        This changes the random states. They are restored before the function is called.
        """
        if "loader" in saved and _saves_position(self.loader) and not self._fast_forward:
            self._start = dict(saved["start"])
            self.loader.load_state_dict(saved["loader"])
            iterator = iter(self.loader)
            return lambda: iterator
        restore_loader_random_state(saved["start"], self._generators)
        iterator = self.start()
        self._start = saved["start"]
        log.info("Loading %d batches of the train loader '%s' again.", delivered, self.name)
        draws_late = _skip(iterator, delivered, f"the train loader '{self.name}'")
        self.draws_late = draws_late and not self._fast_forward
        return lambda: iterator

    # Workers that the loader keeps for its next passes.

    @property
    def has_workers(self) -> bool:
        """Whether the loader has workers from a pass before, which the next pass reuses."""
        keeps = getattr(self.loader, "persistent_workers", False)
        return bool(keeps) and getattr(self.loader, "_iterator", None) is not None

    @property
    def worker_seed(self) -> torch.Tensor | None:
        """The state of the generator from which the workers' seed was drawn."""
        return None

    def restore_workers(self, has_workers: bool, seed: torch.Tensor | None) -> None:
        """Start the workers that the loader had, or remove those that it had not."""
        if self.has_workers and not has_workers:
            self.loader._iterator = None
        elif has_workers and not self.has_workers:
            self._start_workers(seed)

    def _start_workers(self, seed: torch.Tensor | None) -> None:
        iter(self.loader)


class DataLoaderPasses(LoaderPasses):
    """Passes over a copy of a `DataLoader` that has a sampler which can skip indices."""

    def __init__(
        self, loader: DataLoader[Any], name: str, seed_key: SeedKey = None, *, fast_forward: bool
    ) -> None:
        has_indices = not isinstance(loader.dataset, IterableDataset)
        super().__init__(loader, name, seed_key if has_indices else None, fast_forward=fast_forward)
        self._has_indices, self._reuses_workers = has_indices, False
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        seeder = torch.default_generator if loader.generator is None else loader.generator
        self._sampler = IndexSampler(sampler, self._generators, seeder, ahead)
        if self.has_workers:
            workers: Any = loader._iterator
            if (self._seed_key is not None) != isinstance(workers._dataset, SeededDataset):
                loader._iterator = None  # they have a dataset of the other kind
            else:
                previous = workers._index_sampler
                self._sampler.worker_seed = getattr(previous, "worker_seed", None)
                workers._index_sampler = self._sampler

    @property
    def worker_seed(self) -> torch.Tensor | None:
        """The seed of the workers of the latest pass."""
        return self._sampler.worker_seed

    def start(self) -> Iterator[Any]:
        """Start a pass."""
        self._start = loader_random_state(self._generators)
        self._reuses_workers = self.has_workers
        self._sampler.begin(self._pass_seed_key(), draws_seed=not self._reuses_workers)
        return self._iterate(self.loader.generator)

    def _pass_seed_key(self) -> SeedKey:
        ended = sum(times for _, times in self._ended)
        return None if self._seed_key is None else (*self._seed_key, ended)

    def indices_of(self, batch_idx: int) -> Any:
        """Return the indices of a recent batch, by its number in the epoch; None if unknown."""
        number = batch_idx + 1 - self.ended_batches()
        return self._sampler.recent(number) if self._has_indices else None

    def _iterate(self, generator: torch.Generator | None) -> Iterator[Any]:
        loader = copy.copy(self.loader)
        replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # Not by assignment: a DataLoader refuses to change these after its construction.
        loader.__dict__.update({replaced: self._sampler, "generator": generator})
        if self._seed_key is not None:
            batched = loader.batch_sampler is not None
            loader.__dict__["dataset"] = SeededDataset(loader.dataset, batched=batched)
        if loader.num_workers and dist.is_available() and dist.is_initialized():
            sleep(_SETTLING)
        iterator: Iterator[Any] = iter(loader)
        if loader.persistent_workers:
            self.loader._iterator = loader._iterator
        return iterator

    def _pass_dict(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "reuses_workers": self._reuses_workers,
            "worker_seed": self.worker_seed,
            "indices": self._sampler.state_dict() if self._has_indices else None,
        }

    def continue_pass(
        self, saved: Mapping[str, Any], delivered: int
    ) -> Callable[[], Iterator[Any]]:
        """Return a function that continues the pass behind the indices that were delivered."""
        if saved["indices"] is None or self._fast_forward:
            self.restore_workers(saved["reuses_workers"], saved["worker_seed"])
            return super().continue_pass(saved, delivered)
        self._start, self._reuses_workers = dict(saved["start"]), saved["reuses_workers"]
        self._sampler.begin(self._pass_seed_key(), draws_seed=False)
        self.draws_late = self._sampler.load_state_dict(saved["indices"], delivered)
        self._sampler.worker_seed = saved["worker_seed"]
        self.loader._iterator = None  # of another pass
        return lambda: self._iterate(generator_with(self.worker_seed))

    def _start_workers(self, seed: torch.Tensor | None) -> None:
        self._sampler.give_none()
        self._iterate(generator_with(seed))
        self._sampler.worker_seed = seed


def generator_with(state: torch.Tensor | None) -> torch.Generator:
    """Return a generator with this state."""
    generator = torch.Generator()
    if state is not None:
        generator.set_state(state.cpu())
    return generator


def _skip(items: Iterator[Any], n: int, what: str) -> bool:
    """Drop n items; return whether those after the first use global random numbers."""
    found = sum(1 for _ in islice(items, min(n, 1)))
    after_first = random_state(_CPU)
    found += sum(1 for _ in islice(items, n - found))
    if found < n:
        raise CheckpointError(
            f"The checkpoint was made after {n} batches of {what}, but it has only {found}. Resume "
            "with the data of the run."
        )
    return not is_same_state(after_first, random_state(_CPU))


class IndexSampler:
    """Passes on what a sampler or batch sampler gives, and records it.

    The loader draws the seed of its workers from `seeder`, and so many indices `ahead`.
    """

    def __init__(
        self, sampler: Any, generators: Sequence[Any], seeder: torch.Generator, ahead: int
    ) -> None:
        self.worker_seed: torch.Tensor | None = None  # the state from which the seed was drawn
        self._sampler, self._generators, self._seeder = sampler, generators, seeder
        self._seed_key: SeedKey = None
        self._start: dict[str, Any] | None = None  # random states when the pass begins
        self._first: dict[str, Any] | None = None  # the same, when the first index is drawn
        self._drawn = 0
        self._is_over = False  # whether the sampler was asked for an index after its last
        self._recent: deque[Any] = deque(maxlen=ahead + 2)
        self._continued: Iterator[Any] | None = None
        self._draws_seed = False

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(self, seed_key: SeedKey, *, draws_seed: bool) -> None:
        """Prepare a new pass; the loader then draws a seed for new workers, or not."""
        self._seed_key, self._draws_seed = seed_key, draws_seed
        self._first = self._continued = None

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers calls this twice when it starts them; the second call counts.
        if self._continued is not None:
            return self._continued
        self._start = loader_random_state(self._generators)
        self._first, self._drawn, self._is_over = None, 0, False
        self._recent.clear()
        indices = iter(self._sampler)
        if self._draws_seed:
            self._draws_seed = False
            self.worker_seed = self._seeder.get_state()
        return self._with_seeds(self._draw(indices))

    def recent(self, number: int) -> Any:
        """Return what was drawn as this number, from 1; None if that is long ago or to come."""
        behind = self._drawn - number
        return self._recent[-1 - behind] if 0 <= behind < len(self._recent) else None

    def give_none(self) -> None:
        """Give no index to the next iterator, whose workers are only started."""
        self._continued = iter(())

    def state_dict(self) -> dict[str, Any] | None:
        """Return what `load_state_dict` needs to continue the pass; None if none has begun."""
        if self._first is None:
            return None
        recent = list(self._recent)
        return {
            "start": self._start,
            "first": self._first,
            "drawn": self._drawn,
            "is_over": self._is_over,
            "recent": [_pack(one) for one in recent] if all(map(_is_plain, recent)) else [],
        }

    def load_state_dict(self, state: Mapping[str, Any], delivered: int) -> bool:
        """Continue a pass after so many delivered batches, with the next iterator.

        Return whether the sampler uses global random numbers within a pass.
        """
        recent = [one.tolist() if isinstance(one, torch.Tensor) else one for one in state["recent"]]
        waiting = state["drawn"] - delivered
        if not 0 <= waiting <= len(recent):
            waiting = 0
        drawn = delivered + waiting
        restore_loader_random_state(state["start"], self._generators)
        indices = iter(self._sampler)
        restore_loader_random_state(state["first"], self._generators)
        draws_late = _skip(indices, drawn, "a loader's sampler")
        if state["is_over"]:  # a sampler may draw random numbers at its end, too
            next(indices, None)
        self._start, self._first = state["start"], state["first"]
        self._drawn, self._is_over = drawn, state["is_over"]
        self._recent.extend(recent)
        rest = chain(recent[len(recent) - waiting :], self._draw(indices))
        self._continued = self._with_seeds(rest)
        return draws_late

    def _draw(self, indices: Iterator[Any]) -> Iterator[Any]:
        if self._first is None:
            self._first = loader_random_state(self._generators)
        for index in indices:
            self._drawn += 1
            self._recent.append(index)
            yield index
        self._is_over = True

    def _with_seeds(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Return the indices with their seeds, for a `SeededDataset`; as they are without a key."""
        key = self._seed_key
        return indices if key is None else (SeededIndex(key, index) for index in indices)


def _is_plain(index: Any) -> bool:
    """Return whether a checkpoint restores this index with its type."""
    kind = type(index)
    return kind in (int, str) or (kind in (list, tuple) and all(map(_is_plain, index)))


def _pack(index: Any) -> Any:
    """Return a list of integers as a tensor, which is saved fast."""
    if type(index) is list and index and all(type(one) is int for one in index):
        return torch.frombuffer(array("q", index), dtype=torch.int64)
    return index


class SeededIndex(NamedTuple):
    """An index and what its seed is made from. It travels to workers, which keep their dataset."""

    seed_key: tuple[int, ...]
    index: Any


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
