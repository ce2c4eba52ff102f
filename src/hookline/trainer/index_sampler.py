"""The sampler of a DataLoader, recorded so that its pass can be continued without loading data.

A sampler decides its order with random numbers: from the global generators, or from one of its own;
when it is iterated over, or when the first index is drawn. Recorded are therefore the random states
at both moments, and how many indices were drawn. To continue, the sampler is iterated over with
these states, and the indices that were drawn are skipped.

With workers, more indices are drawn than batches were delivered. The last indices are kept, so that
those in between are exact for samplers that draw random numbers during the pass, too.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch

from hookline.errors import CheckpointError
from hookline.loop.random_state import (
    generator_state,
    is_same_state,
    random_state,
    restore_random_state,
    set_generator_state,
)
from hookline.trainer.seeded_dataset import add_seeds

__all__ = ["IndexSampler", "pass_state", "restore_pass_state"]

_CPU = torch.device("cpu")  # samplers draw nothing on other devices


def pass_state(generators: Sequence[Any]) -> dict[str, Any]:
    """Return the states of the global generators and of these."""
    return {
        "random": random_state(_CPU),
        "generators": [generator_state(generator) for generator in generators],
    }


def restore_pass_state(state: Mapping[str, Any], generators: Sequence[Any]) -> None:
    """Restore the states that `pass_state` returned."""
    restore_random_state(state["random"], _CPU)
    for generator, saved in zip(generators, state["generators"], strict=True):
        set_generator_state(generator, saved)


class IndexSampler:
    """Passes on what a sampler or batch sampler gives, and records it.

    Args:
        sampler: the sampler.
        generators: the generators that the loader, its sampler and its dataset have.
        seeder: the generator from which the loader draws the seed of its workers.
        ahead: how many indices the loader may draw before they are delivered.
    """

    def __init__(
        self, sampler: Any, generators: Sequence[Any], seeder: torch.Generator, ahead: int
    ) -> None:
        self.worker_seed: torch.Tensor | None = None  # the state from which the seed was drawn
        self.draws_late = False  # whether the sampler uses global random numbers within a pass
        self._sampler = sampler
        self._generators = generators
        self._seeder = seeder
        self._seed_key: tuple[int, ...] | None = None
        self._start: dict[str, Any] | None = None  # random states when the pass begins
        self._first: dict[str, Any] | None = None  # the same, when the first index is drawn
        self._drawn = 0
        self._is_over = False  # whether the sampler was asked for an index after its last
        self._recent: deque[Any] = deque(maxlen=ahead + 2)
        self._continued: Iterator[Any] | None = None
        self._creates_workers = False
        self._is_new = False

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(
        self,
        start: dict[str, Any],
        seed_key: tuple[int, ...] | None,
        *,
        creates_workers: bool,
    ) -> None:
        """Prepare a new pass, before the loader is iterated over.

        Args:
            start: the random states now.
            seed_key: what the seeds of samples are made from; None if they get none.
            creates_workers: whether the loader will draw a seed.
        """
        self._seed_key, self._creates_workers = seed_key, creates_workers
        self._start, self._is_new = start, True
        self._first = self._continued = None

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers calls this twice when it starts them; the second call counts.
        if self._continued is not None:
            return self._continued
        if not self._is_new:
            self._start = pass_state(self._generators)
        self._is_new = False
        self._drawn, self._is_over = 0, False
        self._recent.clear()
        indices = iter(self._sampler)
        if self._creates_workers:
            self._creates_workers = False
            self.worker_seed = self._seeder.get_state()
        return self._with_seeds(self._draw_first(indices))

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

    def load_state_dict(self, state: Mapping[str, Any], delivered: int) -> None:
        """Continue a pass after so many delivered batches, with the next iterator."""
        recent = [_unpack(one) for one in state["recent"]]
        waiting = state["drawn"] - delivered
        if not 0 <= waiting <= len(recent):
            waiting = 0
        drawn = delivered + waiting
        restore_pass_state(state["start"], self._generators)
        indices = iter(self._sampler)
        restore_pass_state(state["first"], self._generators)
        found = _skip(indices, min(drawn, 1))
        after_first = random_state(_CPU)
        found += _skip(indices, drawn - found)
        if found < drawn:
            raise CheckpointError(
                f"The checkpoint was made after {drawn} batches were drawn from a loader, but "
                f"its sampler has only {found}. Resume with the data of the run."
            )
        if state["is_over"]:  # a sampler may draw random numbers at its end, too
            _skip(indices, 1)
        self.draws_late = not is_same_state(after_first, random_state(_CPU))
        self._start, self._first = state["start"], state["first"]
        self._drawn, self._is_over = drawn, state["is_over"]
        self._recent.extend(recent)
        rest = chain(recent[len(recent) - waiting :], self._draw(indices))
        self._continued = self._with_seeds(rest)

    def _draw_first(self, indices: Iterator[Any]) -> Iterator[Any]:
        self._first = pass_state(self._generators)
        yield from self._draw(indices)

    def _draw(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            self._drawn += 1
            self._recent.append(index)
            yield index
        self._is_over = True

    def _with_seeds(self, indices: Iterable[Any]) -> Iterator[Any]:
        return add_seeds(indices, self._seed_key)


def _skip(indices: Iterator[Any], n: int) -> int:
    """Draw indices and drop them; return how many there were."""
    return sum(1 for _ in islice(indices, n))


def _is_plain(index: Any) -> bool:
    """Return whether a checkpoint restores this index with its type."""
    kind = type(index)
    return kind in (int, str) or (kind in (list, tuple) and all(map(_is_plain, index)))


def _pack(index: Any) -> Any:
    """Return a list of integers as a tensor, which is saved fast."""
    if type(index) is list and index and all(type(one) is int for one in index):
        return torch.frombuffer(array("q", index), dtype=torch.int64)
    return index


def _unpack(index: Any) -> Any:
    return index.tolist() if isinstance(index, torch.Tensor) else index
