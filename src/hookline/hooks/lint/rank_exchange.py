"""RankExchange: values that ranks show each other, without waiting for each other.

A rank writes its values into the store of torch.distributed, and reads those of the others when
they are there. Nothing here is a collective: a rank that trains alone, or has ended, stops nobody.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch.distributed as dist

_WAIT = 5.0  # seconds, at the end of training
_numbers = count()

log = logging.getLogger(__name__)


class RankExchange:
    """Publishes the values of this rank, and receives those of all ranks.

    Attributes:
        rank: of this process.
        ranks: how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.ranks = 0, 1
        self._store: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
            from torch.distributed.distributed_c10d import _get_default_store

            self._store = _get_default_store()
            self._prefix = f"hookline_lint_{next(_numbers)}"  # all ranks begin their loops in order
        self._pending: list[tuple[int, int, dict[str, Callable[..., None]]]] = []

    def publish(
        self, number: int, step: int, values: Mapping[str, tuple[Any, Callable[..., None]]]
    ) -> None:
        """Show the values of a step to the other ranks."""
        own = {key: value for key, (value, _) in values.items()}
        with self._or_never():
            self._store.set(self._key(number, self.rank), json.dumps(own))
            judges = {key: judge for key, (_, judge) in values.items()}
            self._pending.append((number, step, judges))

    def receive(self) -> Iterator[tuple[int, Callable[..., None], list[Any]]]:
        """Yield what all ranks have shown: the step, the judge, and the values by rank."""
        while self._pending:
            number, step, judges = self._pending[0]
            everyone = self._read_all(number)
            if everyone is None:
                return
            del self._pending[0]
            for key, judge in judges.items():
                if all(key in each for each in everyone):
                    yield step, judge, [each[key] for each in everyone]

    def wait(self) -> None:
        """Wait a little until the other ranks have shown their last values."""
        end = time.monotonic() + _WAIT
        while self._pending and time.monotonic() < end:
            if self._read_all(self._pending[-1][0]) is not None:
                return
            time.sleep(0.01)

    def _read_all(self, number: int) -> list[Any] | None:
        """Return what the ranks have shown of a step; None if one is missing."""
        keys = [self._key(number, rank) for rank in range(self.ranks)]
        with self._or_never():
            if self._store.check(keys):
                return [json.loads(self._store.get(key)) for key in keys]
        return None

    @contextmanager
    def _or_never(self) -> Generator[None, None, None]:
        """Exchange nothing any more if the store is gone, as at the end of a program."""
        try:
            yield
        except RuntimeError as error:
            log.debug("Ranks are not compared any more: %s", error)
            self.ranks, self._pending = 1, []

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}_{number}_{rank}"
