"""Sharing the batches of a loader among processes.

All processes draw the same order, with the random states of rank 0, and each takes every n-th
batch: together they train on the batches that one process would train on. The last round is filled
up with batches from the beginning, so that all processes have equally many. Validation is not
filled up: a process may have fewer batches, or none.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hookline.loop.processes import SingleProcessGroup
from hookline.loop.random_state import (
    draw_apart,
    generators_of,
    random_state,
    restore_random_state,
)
from hookline.trainer.data_stream import length_of, name_loaders
from hookline.trainer.loader_passes import pass_state, restore_pass_state

_CPU = torch.device("cpu")
_END: Final = object()


class SharedItems:
    """The share of this process in what a sampler, a batch sampler or a loader gives.

    Of a loader, every process loads all batches. `generators` are those that the source uses; None
    for those that it then has itself. For `draws_late` see `_draw_alike`.
    """

    def __init__(
        self,
        source: Any,
        processes: SingleProcessGroup,
        generators: Sequence[Any] | None,
        *,
        draws_late: bool,
        fill: bool,
    ) -> None:
        self._source, self._processes, self._generators = source, processes, generators
        self._draws_late, self._fill = draws_late, fill

    def __len__(self) -> int:
        length = length_of(self._source)
        if length is None:
            raise TypeError(f"A {type(self._source).__name__} has no len()")
        rank, size = self._processes.rank, self._processes.size
        return -(-length // size) if self._fill else len(range(rank, length, size))

    def __iter__(self) -> Iterator[Any]:
        source, generators = self._source, self._generators
        if isinstance(source, list | tuple):
            return _take_share(iter(source), self._processes, fill=self._fill)
        if generators is None:
            generators = generators_of([source])
        items = _draw_alike(source, self._processes, generators, draws_late=self._draws_late)
        return _take_share(items, self._processes, fill=self._fill)


def _draw_alike(
    source: Iterable[Any],
    processes: SingleProcessGroup,
    generators: Sequence[Any],
    *,
    draws_late: bool,
) -> Iterator[Any]:
    """Iterate with the random states of rank 0, so that all processes get the same items.

    If items after the first may use global random numbers, too (`draws_late`), they get a sequence
    of their own: training uses these numbers in between, and other ones in each process.
    """
    own = pass_state(generators)
    restore_pass_state(processes.broadcast(own), generators)
    items = iter(source)
    first = next(items, _END)  # samplers draw their order here
    after_first = random_state(_CPU) if draws_late else None
    if not processes.is_main:
        restore_random_state(own["random"], _CPU)
    if first is not _END:
        yield first
        yield from items if after_first is None else draw_apart(items, after_first)


def _take_share(
    items: Iterator[Any], processes: SingleProcessGroup, *, fill: bool
) -> Iterator[Any]:
    """Iterate over the items of this process: every n-th."""
    rank, size = processes.rank, processes.size
    first: list[Any] = []  # items of the beginning, to fill up the last round
    while True:
        turn = list(islice(items, size))
        first += turn[: size - len(first)]
        is_last = len(turn) < size
        if is_last and turn and fill:
            turn = list(islice(chain(turn, cycle(first)), size))
        if len(turn) > rank:
            yield turn[rank]
        if is_last:
            return


def share_loaders(
    loaders: Any, processes: SingleProcessGroup, what: str, *, fill: bool
) -> dict[str, Any]:
    """Return the loaders by name, each with the share of this process, filled up or not.

    A loader whose sampler is a `DistributedSampler`, or that saves its own position, is shared
    already and stays as it is.
    """
    return {
        name: _share_loader(loader, processes, fill=fill)
        for name, loader in name_loaders(loaders, what).items()
    }


def _share_loader(loader: Any, processes: SingleProcessGroup, *, fill: bool) -> Any:
    if processes.size == 1 or _is_shared(loader):
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        late = not getattr(loader, "num_workers", 0)  # workers have seeds of their own
        batches: Any = SharedItems(loader, processes, None, draws_late=late, fill=fill)
        batches.whole_loader = loader
        return batches
    shared = copy.copy(loader)
    replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
    inner = getattr(loader, replaced)
    is_torch = [type(one).__module__.startswith("torch.") for one in (inner, *_samplers(inner))]
    late = not all(is_torch)
    generators = generators_of([loader])
    sampler: Any = SharedItems(inner, processes, generators, draws_late=late, fill=fill)
    sampler.sampler = inner  # samplers are looked for within samplers
    # Not by assignment: a DataLoader refuses to change these after its construction.
    shared.__dict__[replaced] = sampler
    shared.whole_loader = loader  # for the run's manifest
    if loader.num_workers:
        shared.worker_init_fn = _WorkerStart(loader.worker_init_fn)
    return shared


class _WorkerStart:
    """Starts a worker that only its own process may end, not a SIGTERM to all processes of a job.

    torchrun forwards SIGTERM to workers of loaders, too. A process without workers could not take
    part in the step after which all processes save.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._init = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_with_parent, daemon=True).start()
        if self._init is not None:
            self._init(worker_id)


def _end_with_parent() -> None:
    """End this worker when the process that has started it sends SIGTERM; ignore it of others."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def end_together(batches: Iterator[Any], processes: SingleProcessGroup) -> Iterator[Any]:
    """Iterate over batches until one of the processes has no more; asks them for each batch."""
    while True:
        batch = next(batches, _END)
        (is_over,) = processes.any(batch is _END)
        if is_over:
            return
        yield batch


def _is_shared(loader: Any) -> bool:
    saves_position = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return saves_position or any(isinstance(s, DistributedSampler) for s in _samplers(loader))


def set_loader_epoch(loaders: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch` of the loaders, their samplers and datasets that have it."""
    for loader in loaders:
        inner = getattr(loader, "whole_loader", loader)
        for one in (inner, getattr(inner, "dataset", None), *_samplers(inner)):
            set_epoch = getattr(one, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers of a loader, also those within a batch sampler."""
    found: list[Any] = []
    waiting = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    while waiting:
        sampler = waiting.pop()
        if sampler is not None and not any(sampler is one for one in found):
            found.append(sampler)
            waiting.append(getattr(sampler, "sampler", None))
    return found
