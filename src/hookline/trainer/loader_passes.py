"""The passes over one loader: started, saved in the middle, and continued at the same batch.

| loader | is continued by |
|---|---|
| `DataLoader` with a map-style dataset | skipping indices; no data is loaded |
| with `state_dict` and `load_state_dict`: torchdata's `StatefulDataLoader` | its own state |
| anything else that can be iterated over | loading and dropping batches |

To skip indices, the sampler of a `DataLoader` is recorded. It decides its order with random
numbers: from the global generators, or from one of its own; when it is iterated over, or when the
first index is drawn. Recorded are therefore the random states at both moments, and how many indices
were drawn. To continue, the sampler is iterated over with these states, the indices that were
delivered are skipped, and those that were only drawn, ahead for workers, are loaded.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from hookline.errors import CheckpointError
from hookline.loop.random_state import (
    generators_of,
    is_same_state,
    loader_random_state,
    random_state,
    restore_loader_random_state,
)
from hookline.trainer.data_stream import length_of

log = logging.getLogger("hookline")
# Seconds between a collective and the fork of workers. A thread of gloo enters Python for a moment
# after the collective, and a process that is forked in that moment waits for ever (Python 3.11).
_SETTLING = 0.002
_CPU = torch.device("cpu")  # samplers draw nothing on other devices
_MAX_AHEAD = 100_000  # indices that were drawn ahead for workers; more are not valid


def make_passes(loader: Any, name: str) -> LoaderPasses:
    """Return the passes over a loader in an epoch, by what can be done with it."""
    kind = DataLoaderPasses if skips_indices(loader) else LoaderPasses
    return kind(loader, name)


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

    def __init__(self, loader: Any, name: str) -> None:
        self.loader, self.name = loader, name
        self.draws_late = False  # whether a continued pass uses global random numbers as it goes
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
        if "loader" in saved and _saves_position(self.loader):
            self._start = dict(saved["start"])
            self.loader.load_state_dict(saved["loader"])
            iterator = iter(self.loader)
            return lambda: iterator
        restore_loader_random_state(saved["start"], self._generators)
        iterator = self.start()
        self._start = saved["start"]
        log.info("Loading %d batches of the train loader '%s' again.", delivered, self.name)
        _, self.draws_late = _repeat(iterator, delivered, f"the train loader '{self.name}'")
        return lambda: iterator

    @property
    def has_workers(self) -> bool:
        """Whether the loader has workers from a pass before, which the next pass reuses."""
        keeps = getattr(self.loader, "persistent_workers", False)
        return bool(keeps) and getattr(self.loader, "_iterator", None) is not None

    def restore_workers(self, has_workers: bool) -> None:
        """Start the workers that the loader had, or remove those that it had not."""
        if self.has_workers and not has_workers:
            self.loader._iterator = None
        elif has_workers and not self.has_workers:
            iter(self.loader)


class DataLoaderPasses(LoaderPasses):
    """Passes over a copy of a `DataLoader` that has a sampler which can skip indices."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        super().__init__(loader, name)
        self._has_indices = not isinstance(loader.dataset, IterableDataset)
        self._had_workers = False  # in the run that is resumed, before its next pass
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._sampler = IndexSampler(sampler, self._generators, ahead)
        if self.has_workers:
            workers: Any = loader._iterator
            workers._index_sampler = self._sampler

    def start(self) -> Iterator[Any]:
        """Start a pass."""
        self._start = loader_random_state(self._generators)
        self._sampler.begin()
        if self._had_workers:  # the seed of new ones is not drawn from the run's random numbers
            self._had_workers = False
            return self._iterate(_copy_of_generator(self._start))
        return self._iterate(self.loader.generator)

    def indices_of(self, batch_idx: int) -> Any:
        """Return the indices of a recent batch, by its number in the epoch; None if unknown."""
        number = batch_idx + 1 - self.ended_batches()
        return self._sampler.recent(number) if self._has_indices else None

    def _iterate(self, generator: torch.Generator | None) -> Iterator[Any]:
        loader = copy.copy(self.loader)
        replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # Not by assignment: a DataLoader refuses to change these after its construction.
        loader.__dict__.update({replaced: self._sampler, "generator": generator})
        if loader.num_workers and dist.is_available() and dist.is_initialized():
            sleep(_SETTLING)
        iterator: Iterator[Any] = iter(loader)
        if loader.persistent_workers:
            self.loader._iterator = loader._iterator
        return iterator

    def _pass_dict(self) -> dict[str, Any]:
        indices = self._sampler.state_dict() if self._has_indices else None
        return {"start": self._start, "indices": indices}

    def continue_pass(
        self, saved: Mapping[str, Any], delivered: int
    ) -> Callable[[], Iterator[Any]]:
        """Return a function that continues the pass behind the indices that were delivered."""
        self.loader._iterator = None  # of another pass
        if saved["indices"] is None:
            return super().continue_pass(saved, delivered)
        self._start = dict(saved["start"])
        self._sampler.begin()
        self.draws_late = self._sampler.load_state_dict(saved["indices"], delivered)
        return lambda: self._iterate(_copy_of_generator(saved["start"]))

    @property
    def has_workers(self) -> bool:
        """Whether the next pass reuses workers, or starts again those of a run that is resumed."""
        return self._had_workers or super().has_workers

    def restore_workers(self, has_workers: bool) -> None:
        """Remember that the next pass draws no seed if the loader had workers, or remove them."""
        if not has_workers:
            self.loader._iterator = None
        self._had_workers = has_workers and self.loader._iterator is None


def _copy_of_generator(state: Mapping[str, Any]) -> torch.Generator:
    """Return a copy of torch's global generator in a state, which draws the seed of workers."""
    generator = torch.Generator()
    generator.set_state(state["random"]["torch"].cpu())
    return generator


def _repeat(items: Iterator[Any], n: int, what: str, *, keep: int = 0) -> tuple[deque[Any], bool]:
    """Draw n items again.

    Return the last so many to keep, and whether items after the first use global random numbers.
    """
    latest: deque[Any] = deque(maxlen=keep)
    found, after_first = 0, None
    for item in islice(items, n):
        latest.append(item)
        found += 1
        after_first = after_first or random_state(_CPU)
    if found < n:
        raise CheckpointError(
            f"The checkpoint was made after {n} batches of {what}, but it has only {found}. Resume "
            "with the data of the run."
        )
    return latest, found > 1 and not is_same_state(after_first, random_state(_CPU))


class IndexSampler:
    """Passes on what a sampler or batch sampler gives, and counts it.

    The loader draws so many indices `ahead`, for workers.
    """

    def __init__(self, sampler: Any, generators: Sequence[Any], ahead: int) -> None:
        self._sampler, self._generators = sampler, generators
        self._start: dict[str, Any] | None = None  # random states when the pass begins
        self._first: dict[str, Any] | None = None  # the same, when the first index is drawn
        self._drawn = 0
        self._is_over = False  # whether the sampler was asked for an index after its last
        self._recent: deque[Any] = deque(maxlen=ahead + 2)
        self._continued: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(self) -> None:
        """Prepare a new pass."""
        self._first = self._continued = None

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers calls this twice when it starts them; the second call counts.
        if self._continued is not None:
            return self._continued
        self._start = loader_random_state(self._generators)
        self._first, self._drawn, self._is_over = None, 0, False
        self._recent.clear()
        return self._draw(iter(self._sampler))

    def recent(self, number: int) -> Any:
        """Return what was drawn as this number, from 1; None if that is long ago or to come."""
        behind = self._drawn - number
        return self._recent[-1 - behind] if 0 <= behind < len(self._recent) else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return what `load_state_dict` needs to continue the pass; None if none has begun."""
        if self._first is None:
            return None
        drawn = {"drawn": self._drawn, "is_over": self._is_over}
        return {"start": self._start, "first": self._first, **drawn}

    def load_state_dict(self, state: Mapping[str, Any], delivered: int) -> bool:
        """Continue a pass after so many delivered batches, with the next iterator.

        Return whether the sampler uses global random numbers within a pass.
        """
        ahead = state["drawn"] - delivered
        ahead = ahead if 0 <= ahead <= _MAX_AHEAD else 0
        restore_loader_random_state(state["start"], self._generators)
        indices = iter(self._sampler)
        restore_loader_random_state(state["first"], self._generators)
        self._drawn = delivered + ahead
        waiting, draws_late = _repeat(indices, self._drawn, "a loader's sampler", keep=ahead)
        if state["is_over"]:  # a sampler may draw random numbers at its end, too
            next(indices, None)
        self._start, self._first = state["start"], state["first"]
        self._is_over = state["is_over"]
        self._recent.extend(waiting)
        self._continued = chain(waiting, self._draw(indices))
        return draws_late

    def _draw(self, indices: Iterator[Any]) -> Iterator[Any]:
        if self._first is None:
            self._first = loader_random_state(self._generators)
        for index in indices:
            self._drawn += 1
            self._recent.append(index)
            yield index
        self._is_over = True
