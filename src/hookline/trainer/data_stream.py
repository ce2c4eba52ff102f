"""Loaders as one stream of batches: named, sharded over the processes, and mixed.

`MixConfig` says which loader the next batch comes from (`order`; a *round* is one batch of each
loader, one pattern, or with weights one batch), where the epoch ends (`length`), and whether a
loader that is exhausted before starts again (`on_exhausted`). "longest" are the fewest whole rounds
that take each loader to its end, "shortest" the most whole rounds before any loader would start
again. Every epoch starts every loader from its beginning, and is the same after every resume.

`iter(loader)` is called once per pass over a loader, when the first batch of that pass is due and
not earlier: a DataLoader draws its seed from torch's random numbers there. No batch is loaded
before it is due. So the end of a loader without `len()` is seen when its next batch is due:
"shortest" ends there and "longest" when the end of every loader was seen, also within a round.

Several processes draw the same order, with the random states of rank 0, and each takes every n-th
batch: together they train on the batches that one process would train on. The last round is filled
up with batches from the beginning, so that all processes have equally many. Validation is not
filled up: a process may have fewer batches, or none.

All of this is one idea, and so one file: which batches an epoch has, and in which order.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from itertools import chain, count, cycle, islice, repeat
from typing import Any, Final, Literal, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hookline.arguments import show_value
from hookline.config.trainer_config import MixConfig
from hookline.errors import ArgumentError, listed, nearest
from hookline.loop.processes import SingleProcessGroup
from hookline.loop.random_state import (
    draw_apart,
    generators_of,
    loader_random_state,
    random_state,
    restore_loader_random_state,
    restore_random_state,
)

_CPU = torch.device("cpu")
_END: Final = object()
_Tuple = tuple[Any, int, int, str]  # a batch, its number within loader and epoch, and its loader


class Passes(Protocol):
    """The passes over one loader."""

    def start(self) -> Iterator[Any]:
        """Start a pass."""
        ...

    def end(self, length: int) -> None:
        """End the pass, which had so many batches."""
        ...


class Stream:
    """One loader or several, as one stream of batches.

    Args:
        loaders: one loader; or a list or tuple of loaders, named "0", "1", …; or a mapping from
            name to loader. A loader is a DataLoader, a list of batches, or any object with
            `__iter__`; an iterator, such as a generator, only for one pass.

            A list or tuple is several loaders if each element is one: an object with `__iter__`
            that is not an array, string or mapping, or a list of batches that hold tensors. It is
            one loader if each element is a batch: a tensor or array, a mapping, a string, an object
            without `__iter__`, or a tuple or list with a tensor in it. Everything else raises an
            error; a mapping says what is meant: `{"train": batches}`.
        mixing: how several become one.
        what: the name of a single loader that has none: "train" or "val".
        may_be_empty: whether a loader may have no batch, as one of several processes may.

    Raises:
        TypeError: something is not a loader, or lacks a length that the mixing needs.
        ValueError: a loader is empty, or the mixing does not fit the loaders.
    """

    def __init__(
        self,
        loaders: Iterable[Any],
        mixing: MixConfig | None = None,
        *,
        what: str = "train",
        may_be_empty: bool = False,
    ) -> None:
        named = name_loaders(loaders, what)
        self.names = list(named)
        self.loaders = list(named.values())
        self._mixing = mixing or MixConfig()
        self._what = what
        self._may_be_empty = may_be_empty
        self._order = _make_order(self._mixing, self.names)
        self._check()

    def length(self) -> int | None:
        """Return the number of batches in an epoch, None when it is not known."""
        lengths = self._lengths()
        wanted, drop = self._mixing.length, self._mixing.on_exhausted == "drop"
        if isinstance(wanted, int) and not drop:
            return wanted
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        if isinstance(wanted, int):
            return min(wanted, sum(known))
        if self._order is None or wanted == "sum" or (wanted == "longest" and drop):
            return sum(known)
        return self._order.longest(known) if wanted == "longest" else self._order.shortest(known)

    def check_restartable(self, epochs: int) -> None:
        """Raise if a loader is an iterator, which has batches for one epoch only."""
        for name, loader in zip(self.names, self.loaders, strict=True):
            loader = getattr(loader, "whole_loader", loader)  # which is sharded
            if epochs > 1 and isinstance(loader, Iterator):
                raise ArgumentError(
                    f"The {self._what} loader '{name}' is an iterator ({type(loader).__name__}), "
                    f"which can be iterated over only once, and {epochs} epochs are asked for. "
                    "Pass something that can be started again: a DataLoader, a list "
                    "(`list(iterator)`, if it fits in memory), or an object whose `__iter__` makes "
                    "a new iterator."
                )

    def epoch(self, passes: Sequence[Passes] | None = None) -> Iterator[_Tuple]:
        """Iterate over one epoch: batches with their numbers, and their loaders' numbers and names.

        Batches are counted within loader and epoch, from 0, also when a loader is started again.
        `passes` start and end the passes over each loader; None if its position is not saved.
        """
        if self._order is None:
            return self._in_sequence(passes)
        return self._mixed(self._order, passes)

    def epoch_by_loader(self) -> Iterator[Iterator[_Tuple]]:
        """Iterate over one epoch of each loader, one after the other."""
        return self._passes(None, range(len(self.names)))

    def _check(self) -> None:
        lengths, mixing = self._lengths(), self._mixing
        for name, loader in zip(self.names, self.loaders, strict=True):
            whole = getattr(loader, "whole_loader", None)  # which is sharded
            if length_of(loader if whole is None else whole) == 0 and (
                whole is not None or not self._may_be_empty
            ):
                raise self._no_batches(name)
        if self._order is None:
            if len(self.names) > 1 and mixing.length == "shortest":
                raise ArgumentError(
                    "length='shortest' with order='sequential' would never reach the later "
                    "loaders; expected length 'sum' or a number, or another order, such as "
                    "'round_robin'."
                )
        elif None in lengths and mixing.length == "sum" and mixing.on_exhausted == "cycle":
            raise ArgumentError(
                f"length='sum' with on_exhausted='cycle' needs the length of every {self._what} "
                f"loader, and '{self.names[lengths.index(None)]}' has no len(). Give it a "
                "`__len__`, or use on_exhausted='drop', length='longest', or a number of batches "
                "as length."
            )
        elif mixing.length == "shortest" and self.length() == 0:
            raise ArgumentError(
                f"length='shortest' leaves no batch for a {self._what} epoch: a loader has fewer "
                "batches than one round of the pattern "
                f"{show_value(tuple(mixing.pattern or ()))} takes from it. Use a shorter pattern, "
                "length='longest', or a number of batches."
            )

    def _no_batches(self, name: str) -> ArgumentError:
        return ArgumentError(
            f"The {self._what} loader '{name}' has no batches; expected at least one. Is its "
            "dataset empty, smaller than one batch with drop_last=True, or an iterator, which can "
            "be iterated over only once?"
        )

    @property
    def had_another_order(self) -> bool:
        """Whether an older version may have mixed these loaders in another order."""
        return self._mixing.weights is not None and len(self.names) > 2

    def _lengths(self) -> list[int | None]:
        return [length_of(loader) for loader in self.loaders]

    # One loader after the other; also a single loader, whatever the order.

    def _in_sequence(self, passes: Sequence[Passes] | None) -> Iterator[_Tuple]:
        wanted = self._mixing.length
        once = range(len(self.names))
        repeats = isinstance(wanted, int) and self._mixing.on_exhausted == "cycle"
        # The hot path of a trainer: no Python code runs between two batches of a loader, and `zip`
        # reuses its tuple if there is no other reference to it.
        batches = chain.from_iterable(self._passes(passes, cycle(once) if repeats else once))
        return islice(batches, wanted) if isinstance(wanted, int) else batches

    def _passes(
        self,
        passes: Sequence[Passes] | None,
        order: Iterable[int],
        is_last: Callable[[int], bool] = lambda idx: False,
    ) -> Iterator[Iterator[_Tuple]]:
        """Iterate over passes in this order of loaders, up to one of which `is_last` is true."""
        loaded = [0] * len(self.names)
        for idx in order:
            numbers = count(loaded[idx])
            batches = self._start_pass(passes, idx)
            yield zip(batches, numbers, repeat(idx), repeat(self.names[idx]))
            before, loaded[idx] = loaded[idx], next(numbers)
            if passes is not None:
                passes[idx].end(loaded[idx] - before)
            if is_last(idx):
                return

    def _start_pass(self, passes: Sequence[Passes] | None, idx: int) -> Iterator[Any]:
        """Start a pass over a loader and load its first batch."""
        iterator = iter(self.loaders[idx]) if passes is None else passes[idx].start()
        first = next(iterator, _END)
        if first is _END:
            if self._may_be_empty:
                return iter(())
            raise self._no_batches(self.names[idx])
        return chain(map([first].pop, [0]), iterator)  # popped, so that it is freed

    # Several loaders, mixed.

    def _mixed(self, order: LoaderOrder, passes: Sequence[Passes] | None) -> Iterator[_Tuple]:
        """Return batches up to the epoch's length, or until one loader has ended, or all have."""
        wanted, total, n = self._mixing.length, self.length(), len(self.names)
        drops, is_shortest = self._mixing.on_exhausted == "drop", wanted == "shortest"
        counts = total is not None and (is_shortest or not drops)  # where the epoch ends
        ended: set[int] = set()

        def is_last(idx: int) -> bool:
            ended.add(idx)
            return not counts and (drops or is_shortest or len(ended) == n)

        loaders = [
            chain.from_iterable(self._passes(passes, repeat(idx), is_last)) for idx in range(n)
        ]

        def draw() -> Iterator[_Tuple]:
            for idx in order.draw(ended if drops else frozenset()):
                batch = next(loaders[idx], None)
                if batch is not None:
                    yield batch
                elif is_shortest or len(ended) == n:
                    return
                batch = None  # freed before the next one is loaded

        limit = total if counts else wanted
        return islice(draw(), limit if isinstance(limit, int) else None)


class LoaderOrder:
    """The order of several loaders: a pattern, or as evenly as weights allow.

    Each loader comes as often as its weight in a period, which is as long as their sum.
    """

    def __init__(self, weights: Sequence[int], pattern: Sequence[int] = ()) -> None:
        self._weights, self._pattern = weights, pattern
        self.round_size = len(pattern) or 1

    def draw(self, dropped: Set[int] = frozenset()) -> Iterator[int]:
        """Yield loaders without end, apart from those that are dropped meanwhile."""
        if self._pattern:
            return (idx for idx in cycle(self._pattern) if idx not in dropped)
        return self._draw_weighted(dropped)

    def _draw_weighted(self, dropped: Set[int]) -> Iterator[int]:
        """Yield the loader that is furthest behind: smooth weighted round-robin."""
        while True:
            left = {idx: w for idx, w in enumerate(self._weights) if idx not in dropped}
            total, behind = sum(left.values()), dict.fromkeys(left, 0)
            while left.keys().isdisjoint(dropped):
                for idx, weight in left.items():
                    behind[idx] += weight
                chosen = max(left, key=behind.__getitem__)
                behind[chosen] -= total
                yield chosen

    def longest(self, lengths: Sequence[int]) -> int:
        """Return the batches in the fewest rounds that take each loader to its end."""
        return -(-max(self._places_of(lengths)) // self.round_size) * self.round_size

    def shortest(self, lengths: Sequence[int]) -> int:
        """Return the batches in the most rounds in which no loader starts again."""
        again = min(self._places_of([own + 1 for own in lengths]))
        return (again - 1) // self.round_size * self.round_size

    def _places_of(self, numbers: Sequence[int]) -> list[int]:
        """Return as which batch the n-th of each loader comes; looks at one period at most."""
        periods = [divmod(n - 1, weight) for n, weight in zip(numbers, self._weights, strict=True)]
        found = [whole * sum(self._weights) for whole, _ in periods]
        left = {idx: rest + 1 for idx, (_, rest) in enumerate(periods)}
        for place, idx in enumerate(self.draw(), 1):
            if idx in left:
                left[idx] -= 1
                if not left[idx]:
                    del left[idx]
                    found[idx] += place
            if not left:
                break
        return found


def _make_order(mixing: MixConfig, names: list[str]) -> LoaderOrder | None:
    """Return the order of several loaders; None for one loader after the other."""
    if mixing.weights is not None:
        weights = mixing.weights
        if not isinstance(weights, Mapping):
            weights = {(names[i : i + 1] or [str(i)])[0]: w for i, w in enumerate(weights)}
        _check_names("weights", weights, names)
        order = LoaderOrder(_to_integers([weights[name] for name in names]))
    elif mixing.pattern is not None:
        in_range = range(len(names))
        named = [
            names[one] if isinstance(one, int) and one in in_range else str(one)
            for one in mixing.pattern
        ]
        _check_names("pattern", named, names)
        pattern = [names.index(name) for name in named]
        order = LoaderOrder([pattern.count(idx) for idx in in_range], pattern)
    else:
        order = LoaderOrder([1] * len(names), range(len(names)))
    return None if len(names) == 1 or mixing.order == "sequential" else order


def _check_names(where: str, used: Iterable[str], names: list[str]) -> None:
    for name in used:
        if name not in names:
            raise ArgumentError(
                f"{where} names the loader {show_value(name)}; expected {listed(names)}."
                f"{nearest(name, names)}"
            )
    missing = [name for name in names if name not in used]
    if missing:
        raise ArgumentError(
            f"{where} has nothing for {listed(missing)}; expected every loader in it. Add what is "
            "missing, or do not pass that loader."
        )


def _to_integers(weights: list[float]) -> list[int]:
    """Return the same proportions in whole numbers; 0.7 is seven tenths, not the nearest float."""
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]


def name_loaders(loaders: Any, what: str) -> dict[str, Any]:
    """Return the loaders by name."""
    if isinstance(loaders, Mapping):
        named = dict(loaders)
    elif isinstance(loaders, list | tuple) and _holds_loaders(loaders, what):
        alone = len(loaders) == 1
        named = {what if alone else str(idx): loader for idx, loader in enumerate(loaders)}
    else:
        named = {what: loaders}
    if not named:
        raise ArgumentError(
            f"There are no {what} loaders: the mapping is empty; expected at least 1."
        )
    for name, loader in named.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(
                f"A {what} loader has the name {show_value(name)}; expected a string that is not "
                "empty."
            )
        if not _may_be_loader(loader):
            raise ArgumentError(
                f"The {what} loader '{name}' is of type {type(loader).__name__}; expected an "
                "object whose `__iter__` gives batches, such as a DataLoader or a list of batches. "
                "A dataset goes into a DataLoader, a single batch into a list: [batch]."
            )
    return named


def _holds_loaders(several: Sequence[Any], what: str) -> bool:
    """Return whether a list holds loaders, and not batches."""
    kinds = [_kind(item) for item in several]
    if several and kinds.count("loader") == len(several):
        return True
    if kinds.count("batch") == len(several):
        return False
    odd = next(i for i, kind in enumerate(kinds) if kind == "unclear" or kind != kinds[0])
    raise ArgumentError(
        f"The {what} {type(several).__name__} may be a list of loaders or a list of batches: "
        f"element {odd}, of type {type(several[odd]).__name__}, could be either. Say which "
        f'with a mapping: {{"{what}": batches}} for one loader, {{"a": first, "b": second}} for '
        "several."
    )


def _kind(item: Any) -> Literal["loader", "batch", "unclear"]:
    """Return what an element of a list is."""
    if not _may_be_loader(item):
        return "batch"
    if not isinstance(item, list | tuple):
        return "loader"
    if any(map(_is_array, item)):
        return "batch"
    of_batches = all(map(_holds_arrays, item))
    # A tuple of tuples of tensors is as likely a batch as it is a loader.
    return "loader" if of_batches and isinstance(item, list) else "unclear"


def _may_be_loader(value: Any) -> bool:
    # Without `__iter__`, Python would iterate over a dataset by its indices, sample by sample.
    return isinstance(value, Iterable) and not (
        isinstance(value, Mapping | str | bytes) or _is_array(value)
    )


def _is_array(value: Any) -> bool:
    """Return whether this is a tensor or an array of any library."""
    return hasattr(type(value), "__array__")


def _holds_arrays(batch: Any) -> bool:
    items = batch.values() if isinstance(batch, Mapping) else batch
    return isinstance(batch, Mapping | list | tuple) and any(_is_array(item) for item in items)


def length_of(loader: Any) -> int | None:
    """Return the number of batches, None if it is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader over a stream has a len() that raises
        return None


# -- several processes -----------------------------------------------------------------------------


class ShardedItems:
    """The items of this process, every n-th, of a sampler, a batch sampler or a loader.

    Of a loader, every process loads all batches. If items after the first may use global random
    numbers (`draws_late`), they get a sequence of their own: training uses these numbers in
    between, and other ones in each process.

    Args:
        source: what gives the items.
        loader: what has the generators that the source uses.
        processes: the processes that train together.
        draws_late: see above.
        fill: whether the last round is filled up.
    """

    def __init__(
        self,
        source: Any,
        loader: Any,
        processes: SingleProcessGroup,
        *,
        draws_late: bool,
        fill: bool,
    ) -> None:
        self._source, self._loader, self._processes = source, loader, processes
        self._draws_late, self._fill = draws_late, fill

    def __len__(self) -> int:
        length = length_of(self._source)
        if length is None:
            raise TypeError(f"A {type(self._source).__name__} has no len()")
        rank, size = self._processes.rank, self._processes.size
        return -(-length // size) if self._fill else len(range(rank, length, size))

    def __iter__(self) -> Iterator[Any]:
        rank, size = self._processes.rank, self._processes.size
        is_list = isinstance(self._source, list | tuple)
        items = iter(self._source) if is_list else self._draw_alike()
        first: list[Any] = []  # items of the beginning, to fill up the last round
        while True:
            items_of_all = list(islice(items, size))
            first += items_of_all[: size - len(first)]
            is_last = len(items_of_all) < size
            if is_last and items_of_all and self._fill:
                items_of_all = list(islice(chain(items_of_all, cycle(first)), size))
            if len(items_of_all) > rank:
                yield items_of_all[rank]
            if is_last:
                return

    def _draw_alike(self) -> Iterator[Any]:
        """Iterate with the random states of rank 0, so that all processes get the same items."""
        generators = generators_of([self._loader])
        own = loader_random_state(generators)
        restore_loader_random_state(self._processes.broadcast(own), generators)
        items = iter(self._source)
        first = next(items, _END)  # samplers draw their order here
        after_first = random_state(_CPU) if self._draws_late else None
        if not self._processes.is_main:
            restore_random_state(own["random"], _CPU)
        if first is not _END:
            yield first
            yield from items if after_first is None else draw_apart(items, after_first)


def shard_loaders(
    loaders: Any, processes: SingleProcessGroup, what: str, *, fill: bool
) -> dict[str, Any]:
    """Return the loaders by name, each with the batches of this process, filled up or not.

    A loader whose sampler is a `DistributedSampler`, or that saves its own position, is sharded
    already and stays as it is.
    """
    return {
        name: loader if _is_sharded(loader) else _shard_loader(loader, processes, fill=fill)
        for name, loader in name_loaders(loaders, what).items()
    }


def _is_sharded(loader: Any) -> bool:
    saves_position = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return saves_position or any(isinstance(s, DistributedSampler) for s in _samplers(loader))


def _shard_loader(loader: Any, processes: SingleProcessGroup, *, fill: bool) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        late = not getattr(loader, "num_workers", 0)  # workers have seeds of their own
        batches: Any = ShardedItems(loader, loader, processes, draws_late=late, fill=fill)
        batches.whole_loader = loader
        return batches
    sharded = copy.copy(loader)
    replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
    inner = getattr(loader, replaced)
    is_torch = [type(one).__module__.startswith("torch.") for one in (inner, *_samplers(inner))]
    late = not all(is_torch)
    sampler: Any = ShardedItems(inner, loader, processes, draws_late=late, fill=fill)
    sampler.sampler = inner  # samplers are looked for within samplers
    # Not by assignment: a DataLoader refuses to change these after its construction.
    sharded.__dict__[replaced] = sampler
    sharded.whole_loader = loader  # for the run's manifest
    if loader.num_workers:
        sharded.worker_init_fn = _WorkerStart(loader.worker_init_fn)
    return sharded


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
