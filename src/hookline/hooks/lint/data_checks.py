"""Rule 7, data: each epoch has its own order, workers differ, and no batch is lost."""

from __future__ import annotations

import random
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.torch_watch import LoadedBatch, LossCall
from hookline.tensors.nested import tensors_in

_KEPT_BATCHES = 4  # whose indices are compared from epoch to epoch
_MIN_SAMPLES = 12  # fewer have the same random order too often
_MANY_STARTS = 3
_MANY_SKIPS = 2
_MANY_LABELS = 8


@dataclass(eq=False)
class _Epoch:
    """The batches that one iteration over a loader has delivered."""

    order: list[Any] = field(default_factory=list)
    epoch_of_sampler: Any = None
    loaded: int = 0
    trained: int = 0
    backwards: int = 0
    before_training: int = 0  # batches that were loaded before the first one was trained on


class _LoaderCheck(Check):
    """Follows the epochs of the loaders whose batches are trained on."""

    def setup(self) -> None:
        self._epochs: WeakKeyDictionary[Any, list[_Epoch]] = WeakKeyDictionary()
        self._latest: tuple[Any, _Epoch] | None = None
        self._current: _Epoch | None = None

    def on_loader_start(self, loader: Any, iterator: Any) -> None:
        epochs = self._epochs.setdefault(loader, [])
        epochs.append(_Epoch(epoch_of_sampler=getattr(_sampler(loader), "epoch", None)))
        del epochs[:-4]

    def on_batch_loaded(self, loaded: LoadedBatch) -> None:
        epochs = self._epochs.get(loaded.loader) if loaded.loader is not None else None
        if not epochs:
            return
        epoch = epochs[-1]
        epoch.loaded += 1
        epoch.before_training += not epoch.trained
        if loaded.index < _KEPT_BATCHES and isinstance(loaded.indices, list):
            epoch.order.append(tuple(loaded.indices))
        self._latest = (loaded.loader, epoch)

    def on_batch_trained(self) -> None:
        latest, self._latest = self._latest, None
        if latest is not None:
            loader, self._current = latest
            self._current.trained += 1
            if self._current.trained <= _KEPT_BATCHES:
                self.look(loader, self._epochs[loader])

    def look(self, loader: Any, epochs: list[_Epoch]) -> None:
        """Look at the epochs of a loader, at the first batches of the last one."""


class SameOrderEveryEpoch(_LoaderCheck):
    """A loader that shuffles delivers the same order in each epoch.

    A new order in each epoch is what shuffling is for. A `DistributedSampler` makes its order from
    its epoch, which somebody has to set; a generator that is seeded before each epoch gives the
    same order, too.

    Bug:
        for epoch in range(epochs):
            for batch in loader:  # sampler.set_epoch(epoch) is missing
                ...
    Fix: Call `loader.sampler.set_epoch(epoch)` before each epoch; seed generators once.
    Ignore: When the order is repeated on purpose.
    """

    def look(self, loader: Any, epochs: list[_Epoch]) -> None:
        """Compare the order of the last two epochs."""
        done = [epoch for epoch in epochs if epoch.trained]
        if len(done) < 2 or not _shuffles(loader):
            return
        before, now = done[-2].order, done[-1].order
        compared = min(len(now), _KEPT_BATCHES)
        is_enough = sum(map(len, now[:compared])) >= _MIN_SAMPLES and len(now) > 1
        if is_enough and now[:compared] == before[:compared]:
            self._find(loader, done[-1], sum(map(len, now[:compared])))

    def _find(self, loader: Any, epoch: _Epoch, count: int) -> None:
        sampler = _sampler(loader)
        has_epoch = callable(getattr(sampler, "set_epoch", None))
        fix = (
            f"Call set_epoch(epoch) of the {type(sampler).__name__} before each epoch."
            if has_epoch
            else "Seed the generator of the loader once, before training, and not in each epoch."
        )
        was = f" Its epoch is {epoch.epoch_of_sampler} again." if has_epoch else ""
        self.find(
            f"{_describe(loader)} ({type(sampler).__name__})",
            f"The first {count} samples of two epochs came in the same order, although the loader "
            f"shuffles.{was}",
            fix,
        )


class OrderReplayedAfterResuming(_LoaderCheck):
    """After resuming, the order of the first epoch is used again.

    A run that is resumed in a later epoch continues with an order of its own. Where the generator
    is seeded anew and not restored, samples of the first epoch are seen again, and others never.

    Bug:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader = DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(0))
    Fix: Save and restore the generator's state, or seed it with `seed + epoch`.
    Ignore: When training starts again from the first epoch on purpose.
    """

    def setup(self) -> None:
        super().setup()
        self._has_loaded = False
        self._first: dict[tuple[str, int], Any] = {}  # weakly: a loader may be copied per epoch

    def on_state_loaded(self, target: Any, state: Any) -> None:
        is_optimizer = isinstance(target, torch.optim.Optimizer)
        self._has_loaded = self._has_loaded or (is_optimizer and bool(state.get("state")))

    def look(self, loader: Any, epochs: list[_Epoch]) -> None:
        """Compare the order of the first epoch with that of a run that began from nothing."""
        order = epochs[0].order
        is_early = self.view.steps_seen <= 10 * _KEPT_BATCHES and len(epochs) == 1
        if not is_early or len(order) < 2 or not _shuffles(loader):
            return
        key = (type(loader.dataset).__qualname__, len(loader.dataset))
        if self._first.setdefault(key, weakref.ref(loader))() is not loader:
            return
        if epochs[0].before_training > 1:
            return  # an epoch that has begun goes on: its first batches are skipped
        if not self._has_loaded:
            _first_orders[key] = order
        elif sum(map(len, order)) >= _MIN_SAMPLES and _begins_with(key, order):
            self.find(
                f"{_describe(loader)} ({type(_sampler(loader)).__name__})",
                f"After a saved state was loaded, the first {sum(map(len, order))} samples "
                "came in the order of the very first epoch.",
            )


_first_orders: dict[tuple[str, int], list[Any]] = {}
"""The first batches of runs without a loaded state, by class and length of the dataset."""


def _begins_with(key: tuple[str, int], order: list[Any]) -> bool:
    return _first_orders.get(key, [])[: len(order)] == order


class LoaderIteratorMadeAnew(_LoaderCheck):
    """A loader is iterated from its beginning for every step.

    `next(iter(loader))` starts over: without shuffling it is the same first batch each time, and
    the rest of the data is never seen; with workers, all of them are started for one batch.

    Bug:
        for step in range(steps):
            x, y = next(iter(loader))
    Fix: Iterate over the loader, and start again when it ends.
    Ignore: When one batch is overfitted on purpose; take it once, before the loop.
    """

    def look(self, loader: Any, epochs: list[_Epoch]) -> None:
        """See whether each of the last epochs has one batch."""
        latest = epochs[-_MANY_STARTS:]
        if len(latest) < _MANY_STARTS or any((e.loaded, e.trained) != (1, 1) for e in latest):
            return
        if _length(loader) > 1 and isinstance(_sampler(loader), SequentialSampler):
            self.find(
                _describe(loader),
                f"In {_MANY_STARTS} steps in a row, the loader was started anew and only its first "
                f"batch was used, of {_length(loader)}.",
            )


class BatchesSkippedInEveryEpoch(_LoaderCheck):
    """Batches at the beginning of each epoch are loaded, and not trained on.

    After resuming in the middle of an epoch, its first batches are skipped, once. Where this is
    repeated in later epochs, these batches are never trained on again.

    Bug:
        for epoch in range(start, epochs):
            for i, batch in enumerate(loader):
                if i < batches_done:
                    continue
    Fix: Skip batches only in the epoch that was resumed.
    Ignore: When the first batches of each epoch are for something else.
    """

    def on_loader_start(self, loader: Any, iterator: Any) -> None:
        super().on_loader_start(loader, iterator)
        ended = [epoch for epoch in self._epochs[loader][:-1] if epoch.trained][-2:]
        skipped = [epoch.loaded - epoch.backwards for epoch in ended]
        first = [epoch.before_training - 1 for epoch in ended]
        if len(ended) == 2 and skipped == first and skipped[0] == skipped[1] > 0:
            self._find(loader, skipped[0])
        # Accelerate makes another loader, or sampler, that skips.
        skips = getattr(loader, "skip_batches", 0) or 0
        skips = skips or getattr(getattr(loader, "batch_sampler", None), "skip_batches", 0)
        if self.in_a_row(skips, id(loader.dataset)) >= _MANY_SKIPS and self.view.steps_seen > 1:
            self._find(loader, skips)

    def on_before_backward(self, loss: Any) -> None:
        """Count: several batches may be loaded before they are trained on."""
        if self._current is not None:
            self._current.backwards += 1

    def _find(self, loader: Any, count: int) -> None:
        self.find(
            _describe(loader),
            f"The first {count} batches of an epoch were not trained on, again in the next epoch.",
        )


class WorkersShareRandomNumbers(Check):
    """The workers of a loader draw the same random numbers.

    Each worker gets a copy of the dataset, with the state of its generators. torch seeds only the
    global generators of torch, Python and NumPy per worker.

    Bug:
        self.rng = np.random.default_rng(0)  # in the dataset's __init__
        return self.data[i] + self.rng.normal()  # in __getitem__
    Fix: Make the generator in each worker: in `worker_init_fn`, or at its first use, seeded with
        `torch.initial_seed()`.
    Ignore: When the numbers do not matter.
    """

    def on_loader_start(self, loader: Any, iterator: Any) -> None:
        if not loader.num_workers or loader.worker_init_fn is not None:
            return
        dataset = loader.dataset
        name = _find_generator(dataset)
        if name is not None:
            self.find(
                _describe(loader),
                f"'{name}' of {type(dataset).__name__} is a random generator, and the workers "
                f"({loader.num_workers}) have copies of it in the same state.",
            )


class StreamRepeatedByWorkers(Check):
    """Each worker of a loader reads the whole stream, so every record comes several times.

    Every worker gets a copy of an `IterableDataset`, and iterates over all of it.

    Bug:
        yield from read(self.path)  # in __iter__ of an IterableDataset
        DataLoader(stream, num_workers=2)
    Fix: Let each worker read its part, by `torch.utils.data.get_worker_info()`.
    Ignore: When workers draw random records, and equal ones come by chance.
    """

    def setup(self) -> None:
        self._last: list[Tensor] = []
        self._equal = 0

    @in_due_steps
    def on_batch_loaded(self, loaded: LoadedBatch) -> None:
        loader: Any = loaded.loader
        if loader is None or loader.num_workers < 2:
            return
        if not isinstance(loader.dataset, IterableDataset):
            return
        last, self._last = self._last, [self.sample(x) for x in tensors_in(loaded.batch)]
        if loaded.index % loader.num_workers and [x.shape for x in last] == [
            x.shape for x in self._last
        ]:
            pairs = zip(last, self._last, strict=True)
            equal = torch.stack([(a == b).all() for a, b in pairs]).all()
            varies = torch.stack([(x != x.flatten()[0]).any() for x in self._last]).any()
            self.read([equal, varies], self._judge, loader)

    def _judge(self, numbers: list[float], loader: Any) -> None:
        if self.in_a_row(all(numbers)) >= 2:
            self.find(
                _describe(loader),
                f"Its {loader.num_workers} workers have delivered equal batches, one after the "
                "other, twice.",
            )


class LabelsSorted(Check):
    """Classes come one after the other, because the data are sorted and not shuffled.

    Stochastic gradient descent expects batches that are drawn from all data. Where batches have
    one class each, the model forgets one class while it learns the next.

    Bug:
        loader = DataLoader(dataset_sorted_by_class, batch_size=64)
    Fix: Pass `shuffle=True` to the loader.
    Ignore: When classes are trained one after the other on purpose (continual learning).
    """

    severity = "warning"

    def setup(self) -> None:
        self._ranges: list[tuple[float, float]] = []
        self._loader: Any = None

    @in_due_steps
    def on_batch_loaded(self, loaded: LoadedBatch) -> None:
        self._loader = loaded.loader

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        labels, loader = call.target, self._loader
        if call.name not in ("cross_entropy", "nll_loss") or not call.has_gradients:
            return
        is_sequential = loader is not None and isinstance(_sampler(loader), SequentialSampler)
        is_batch = labels.ndim == 1 and labels.numel() >= _MANY_LABELS
        if is_sequential and is_batch and not labels.is_floating_point():
            read: list[Tensor] = [labels.min(), labels.max(), labels.diff().min()]
            self.read(read, self._judge, loader)

    def _judge(self, numbers: list[float], loader: Any) -> None:
        low, high, smallest_step = numbers
        is_sorted = smallest_step >= 0 and (not self._ranges or low >= self._ranges[-1][1])
        self._ranges = [*self._ranges, (low, high)] if is_sorted else []
        is_long = len(self._ranges) >= _MANY_LABELS
        if is_long and self._ranges[0][0] < self._ranges[-1][1]:
            self.find(
                _describe(loader),
                f"The labels of {len(self._ranges)} batches in a row were sorted, from class "
                f"{self._ranges[0][0]:.0f} to {self._ranges[-1][1]:.0f}.",
            )


def _sampler(loader: Any) -> Any:
    """Return the sampler of single indices."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return inner if inner is not None else sampler


def _shuffles(loader: Any) -> bool:
    sampler = _sampler(loader)
    if isinstance(sampler, RandomSampler):
        return True
    return callable(getattr(sampler, "set_epoch", None)) and getattr(sampler, "shuffle", True)


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # an IterableDataset
        return 0


def _describe(loader: Any) -> str:
    return f"DataLoader of {type(loader.dataset).__name__}"


def _find_generator(dataset: Any) -> str | None:
    """Return the name of a random generator that the code of a dataset uses for its samples."""
    kind = type(dataset)
    code = [
        getattr(getattr(kind, name, None), "__code__", None) for name in ("__getitem__", "__iter__")
    ]
    used = {name for each in code if each is not None for name in each.co_names}
    own = [
        (name, value) for name, value in getattr(dataset, "__dict__", {}).items() if name in used
    ]
    return next((name for name, value in own if _is_generator(value)), None)


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds: list[Any] = [random.Random, torch.Generator]
    if numpy is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
    return isinstance(value, tuple(kinds))
