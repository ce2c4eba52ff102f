"""The passes over one loader: started, saved in the middle, and continued at the same batch.

| loader | is continued by |
|---|---|
| `DataLoader` with a map-style dataset | skipping indices; no data is loaded |
| with `state_dict` and `load_state_dict`: torchdata's `StatefulDataLoader` | its own state |
| anything else that can be iterated over | loading and dropping batches |
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from hookline.errors import CheckpointError
from hookline.loop.random_state import generators_of, is_same_state, random_state
from hookline.trainer.index_sampler import IndexSampler, pass_state, restore_pass_state
from hookline.trainer.seeded_dataset import SeededDataset

__all__ = ["LoaderPasses", "make_passes", "skips_indices"]

log = logging.getLogger("hookline")
_LONG = 5.0  # seconds
# Seconds between a collective and the fork of workers. A thread of gloo enters Python for a moment
# after the collective, and a process that is forked in that moment waits for ever (Python 3.11).
_SETTLING = 0.002
_END = object()
_CPU = torch.device("cpu")


def make_passes(loader: Any, name: str, *, seeds_samples: bool) -> LoaderPasses:
    """Return the passes over a loader, by what can be done with it."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's have a state if theirs has
    if hasattr(inner, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulPasses(loader, name)
    if skips_indices(loader):
        return DataLoaderPasses(loader, name, seeds_samples=seeds_samples)
    return LoaderPasses(loader, name)


def skips_indices(loader: Any) -> bool:
    """Return whether a loader is a `DataLoader` that iterates as torch's does."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


class LoaderPasses:
    """Passes over any object with `__iter__`."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name
        self._generators = generators_of([loader])
        self._start: dict[str, Any] | None = None  # the random states when the pass began
        self._iterator: Iterator[Any] | None = None
        self.draws_late = False  # whether a continued pass uses global random numbers as it goes

    @property
    def workers(self) -> int:
        """The number of the loader's worker processes."""
        return int(getattr(self.loader, "num_workers", 0))

    def start(self, seed_key: tuple[int, ...] | None) -> Iterator[Any]:
        """Start a pass."""
        self._start = pass_state(self._generators)
        return iter(self.loader)

    def end(self) -> None:
        """End the pass."""
        self._start = None

    def indices_of(self, number: int) -> Any:
        """Return the indices of the batch with this number in the pass, from 1; None if unknown."""
        return None

    def state_dict(self, *, loads_ahead: bool) -> dict[str, Any] | None:
        """Return what is needed to continue this pass; None if no pass has begun."""
        return None if self._start is None else {"start": self._start}

    def prepare(
        self,
        saved: Mapping[str, Any],
        delivered: int,
        seed_key: tuple[int, ...] | None,
        *,
        load: bool,
    ) -> None:
        """Go to where a pass was after so many batches; changes the random states.

        Args:
            saved: the pass.
            delivered: the number of batches that were trained on.
            seed_key: what the seeds of samples are made from.
            load: whether to load and drop batches although indices could be skipped.
        """
        restore_pass_state(saved["start"], self._generators)
        self._iterator = self.start(seed_key)
        self._start = saved["start"]
        self._drop(min(delivered, 1), delivered)
        after_first = random_state(_CPU)
        self._drop(delivered - min(delivered, 1), delivered)
        self.draws_late = not load and not is_same_state(after_first, random_state(_CPU))

    def _drop(self, n: int, of: int) -> None:
        """Load n batches and drop them."""
        assert self._iterator is not None
        begin = monotonic()
        for i in range(n):
            if next(self._iterator, _END) is _END:
                raise CheckpointError(
                    f"The checkpoint was made after {of} batches of the train loader "
                    f"'{self.name}', but it has only {of - n + i}. Resume with the data of the run."
                )
            if monotonic() - begin > _LONG:
                begin = float("inf")
                log.warning(
                    "Resuming loads the first %d batches of the train loader '%s' again and drops "
                    "them. A DataLoader with a map-style dataset skips them without loading.",
                    of,
                    self.name,
                )

    def resume(self) -> Iterator[Any]:
        """Return the rest of the pass that `prepare` has prepared."""
        iterator, self._iterator = self._iterator, None
        assert iterator is not None
        return iterator

    # Workers that the loader keeps for its next passes.

    @property
    def has_workers(self) -> bool:
        """Whether the loader has workers from a pass before, which the next pass reuses."""
        keeps = getattr(self.loader, "persistent_workers", False)
        return bool(keeps) and getattr(self.loader, "_iterator", None) is not None

    def worker_seed(self) -> torch.Tensor | None:
        """Return the state of the generator from which the workers' seed was drawn."""
        return None

    def restore_workers(self, has_workers: bool, seed: torch.Tensor | None) -> None:
        """Start the workers that the loader had, or remove those that it had not."""
        if self.has_workers and not has_workers:
            self.loader._iterator = None
        elif has_workers and not self.has_workers:
            self._start_workers(seed)

    def _start_workers(self, seed: torch.Tensor | None) -> None:
        iter(self.loader)


class StatefulPasses(LoaderPasses):
    """Passes over a loader that saves and restores its own position."""

    def state_dict(self, *, loads_ahead: bool) -> dict[str, Any] | None:
        state = super().state_dict(loads_ahead=loads_ahead)
        if state is not None and not loads_ahead:  # else it may be ahead of what was trained on
            state["loader"] = self.loader.state_dict()
        return state

    def prepare(
        self,
        saved: Mapping[str, Any],
        delivered: int,
        seed_key: tuple[int, ...] | None,
        *,
        load: bool,
    ) -> None:
        if "loader" not in saved or load:
            super().prepare(saved, delivered, seed_key, load=load)
            return
        self._start = dict(saved["start"])
        self.loader.load_state_dict(saved["loader"])
        self._iterator = iter(self.loader)


class DataLoaderPasses(LoaderPasses):
    """Passes over a copy of a `DataLoader` that has a sampler which can skip indices."""

    def __init__(self, loader: DataLoader[Any], name: str, *, seeds_samples: bool) -> None:
        super().__init__(loader, name)
        self._has_indices = not isinstance(loader.dataset, IterableDataset)
        self._seeds_samples = seeds_samples and self._has_indices
        self._seed: torch.Tensor | None = None
        self._reuses_workers = False
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        seeder = torch.default_generator if loader.generator is None else loader.generator
        self._sampler = IndexSampler(sampler, self._generators, seeder, ahead)
        if self.has_workers:
            workers: Any = loader._iterator
            if self._seeds_samples != isinstance(workers._dataset, SeededDataset):
                loader._iterator = None  # they have a dataset of the other kind
            else:
                previous = workers._index_sampler
                self._sampler.worker_seed = getattr(previous, "worker_seed", None)
                workers._index_sampler = self._sampler

    def start(self, seed_key: tuple[int, ...] | None) -> Iterator[Any]:
        self._start = pass_state(self._generators)
        self._reuses_workers = self.has_workers
        self._sampler.begin(self._start, seed_key, creates_workers=not self._reuses_workers)
        return self._iterate(self.loader.generator)

    def indices_of(self, number: int) -> Any:
        return self._sampler.recent(number) if self._has_indices else None

    def _iterate(self, generator: torch.Generator | None) -> Iterator[Any]:
        loader = copy.copy(self.loader)
        replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # Not by assignment: a DataLoader refuses to change these after its construction.
        loader.__dict__.update({replaced: self._sampler, "generator": generator})
        if self._seeds_samples:
            batched = loader.batch_sampler is not None
            loader.__dict__["dataset"] = SeededDataset(loader.dataset, batched=batched)
        if loader.num_workers and dist.is_available() and dist.is_initialized():
            sleep(_SETTLING)
        iterator: Iterator[Any] = iter(loader)
        if loader.persistent_workers:
            self.loader._iterator = loader._iterator
        return iterator

    def state_dict(self, *, loads_ahead: bool) -> dict[str, Any] | None:
        state = super().state_dict(loads_ahead=loads_ahead)
        if state is not None:
            state["reuses_workers"] = self._reuses_workers
            state["worker_seed"] = self._sampler.worker_seed
            state["indices"] = self._sampler.state_dict() if self._has_indices else None
        return state

    def prepare(
        self,
        saved: Mapping[str, Any],
        delivered: int,
        seed_key: tuple[int, ...] | None,
        *,
        load: bool,
    ) -> None:
        if saved["indices"] is None or load:
            self.restore_workers(saved["reuses_workers"], saved["worker_seed"])
            super().prepare(saved, delivered, seed_key, load=load)
            return
        self._start, self._reuses_workers = dict(saved["start"]), saved["reuses_workers"]
        self._sampler.begin(self._start, seed_key, creates_workers=False)
        self._sampler.load_state_dict(saved["indices"], delivered)
        self._sampler.worker_seed = saved["worker_seed"]
        self.draws_late = self._sampler.draws_late

    def resume(self) -> Iterator[Any]:
        if self._iterator is not None:
            return super().resume()
        self.loader._iterator = None  # of another pass
        return self._iterate(_generator_with(self._sampler.worker_seed))

    def worker_seed(self) -> torch.Tensor | None:
        return self._sampler.worker_seed

    def _start_workers(self, seed: torch.Tensor | None) -> None:
        self._sampler.give_none()
        self._iterate(_generator_with(seed))
        self._sampler.worker_seed = seed


def _generator_with(state: torch.Tensor | None) -> torch.Generator:
    generator = torch.Generator()
    if state is not None:
        generator.set_state(state.cpu())
    return generator
