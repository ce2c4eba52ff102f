"""Several loaders as one stream of batches, the same in every epoch and after every resume.

What an epoch contains is decided by three settings of `MixConfig`:

`order` says which loader the next batch comes from, and what a *round* is:

| order | turns | a round |
|---|---|---|
| `"sequential"` | a loader from its first batch to its last, then the next | all loaders |
| `"round_robin"` | one batch from each loader | one batch from each |
| `"alternating"` | `pattern`, again and again | one pattern |
| `"weighted"` | by `weights`, as exact quotas | one batch |

`length` says where the epoch ends, and `on_exhausted` what happens to a loader that is exhausted
before:

| length | `on_exhausted="cycle"`: start it again | `on_exhausted="drop"`: drop it |
|---|---|---|
| `"sum"` | as many batches as all loaders have together | each batch exactly once |
| `"longest"` | the fewest whole rounds that take each loader to its end | each batch exactly once |
| `"shortest"` | the most whole rounds before any loader would start again | the same |
| a number | so many batches | so many, or each batch once if that is fewer |

So with loaders of 3 and 1 batches, round-robin: `"longest"` has 6 batches, `"shortest"` has 2.
"sequential" takes every loader once: "sum" and "longest" are the same, "shortest" raises an
error, and only a number larger than the sum starts over, with the first loader. Every epoch
starts every loader from its beginning, also when the last epoch did not reach the loader's end.

`iter(loader)` is called once per pass over a loader, when the first batch of that pass is due and
not earlier: a DataLoader draws its seed from torch's random numbers there. Batches are loaded
before their turn only if a loader has no `len()`: one per loader at the end of a round ("longest"),
or one round ("shortest"; with weights, none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, cycle, islice, repeat
from typing import Any, Final, NamedTuple

from hookline.arguments import show_value
from hookline.config.trainer_config import MixConfig
from hookline.errors import ArgumentError, listed
from hookline.trainer.loader_arguments import length_of, name_loaders
from hookline.trainer.loader_order import LoaderOrder, make_order

__all__ = ["LoadedBatch", "Stream"]

_END: Final = object()
_Tuple = tuple[Any, int, int, str]
_RESTARTABLE = (
    "Pass something that can be started again: a DataLoader, a list (`list(iterator)`, if it fits "
    "in memory), or an object whose `__iter__` makes a new iterator."
)


class LoadedBatch(NamedTuple):
    """One batch and its loader.

    `batch_idx` counts within loader and epoch, from 0, also when a loader is started again.
    """

    batch: Any
    batch_idx: int
    loader_idx: int
    loader_name: str


class Stream:
    """One loader or several, as one stream of batches.

    Args:
        loaders: one loader; or a list or tuple of loaders, named "0", "1", …; or a mapping from
            name to loader. A loader is a DataLoader, a list of batches, or any object with
            `__iter__`. An iterator, such as a generator, can be iterated over only once; a
            second pass over it raises an error.

            A list or tuple is several loaders if each element is one: an object with `__iter__`
            that is not an array, string or mapping, or a list of batches that hold tensors. It is
            one loader if each element is a batch: a tensor or array, a mapping, a string, an object
            without `__iter__`, or a tuple or list with a tensor in it. Everything else raises an
            error; a mapping says what is meant: `{"train": batches}`.
        mixing: how several become one.
        what: the name of a single loader that has none: "train" or "val".
        may_be_empty: whether a loader may have no batch, as the share of one of several processes.

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
        self.start_pass: Callable[[int], Iterator[Any]] = lambda idx: iter(self.loaders[idx])
        self.on_pass_end: Callable[[int, int], None] | None = None  # loader's number, batches
        self.started: set[int] = set()  # iterators that cannot be started again, by id
        self._order = make_order(self._mixing, self.names)
        self._check()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        length = self.length()
        if length is None:
            unknown = [n for n, own in zip(self.names, self._lengths(), strict=True) if own is None]
            raise ArgumentError(
                f"The length of a {self._what} epoch is not known, because these loaders have no "
                f"len(): {listed(unknown)}. Give them a `__len__`, or set the epoch's length as a "
                "number of batches: MixConfig(length=1000)."
            )
        return length

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
            loader = getattr(loader, "whole_loader", loader)  # of which it is a share
            if isinstance(loader, Iterator):
                raise ArgumentError(
                    f"The {self._what} loader '{name}' is an iterator ({type(loader).__name__}), "
                    f"which can be iterated over only once, but {epochs} epochs are asked for. "
                    + _RESTARTABLE
                )

    def epoch(self, skip: int = 0) -> Iterator[LoadedBatch]:
        """Iterate over one epoch.

        Args:
            skip: the number of batches that are loaded and dropped first, to continue an epoch
                that was interrupted.
        """
        if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
            raise ArgumentError(
                f"skip is {show_value(skip)}; expected a number of batches, 0 or more."
            )
        batches = map(LoadedBatch._make, self.tuples())
        return islice(batches, skip, None) if skip else batches

    def tuples(self) -> Iterator[_Tuple]:
        """Iterate over one epoch as plain tuples with the fields of `LoadedBatch`."""
        return self._in_sequence() if self._order is None else self._mixed(self._order)

    def tuples_by_loader(self) -> Iterator[Iterator[_Tuple]]:
        """Iterate over one epoch of each loader, one after the other."""
        return self._passes(range(len(self.names)))

    def _check(self) -> None:
        lengths, mixing = self._lengths(), self._mixing
        for name, loader in zip(self.names, self.loaders, strict=True):
            whole = getattr(loader, "whole_loader", None)  # of which it is a share
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
            raise self._no_whole_round()

    def _no_batches(self, name: str) -> ArgumentError:
        return ArgumentError(
            f"The {self._what} loader '{name}' has no batches; expected at least one. Is its "
            "dataset empty, or smaller than one batch with drop_last=True?"
        )

    def _lengths(self) -> list[int | None]:
        return [length_of(loader) for loader in self.loaders]

    def loads_ahead(self) -> bool:
        """Return whether batches may be loaded before their turn."""
        return self._order is not None and self.length() is None

    # One loader after the other; also a single loader, whatever the order.

    def _in_sequence(self) -> Iterator[_Tuple]:
        wanted = self._mixing.length
        once = range(len(self.names))
        repeats = isinstance(wanted, int) and self._mixing.on_exhausted == "cycle"
        # The hot path of a trainer: no Python code runs between two batches of a loader, and `zip`
        # reuses its tuple if there is no other reference to it.
        batches = chain.from_iterable(self._passes(cycle(once) if repeats else once))
        return islice(batches, wanted) if isinstance(wanted, int) else batches

    def _passes(self, order: Iterable[int]) -> Iterator[Iterator[_Tuple]]:
        loaded = [0] * len(self.names)
        for i in order:
            numbers = count(loaded[i])
            yield zip(self.one_pass(i), numbers, repeat(i), repeat(self.names[i]))
            before, loaded[i] = loaded[i], next(numbers)
            if self.on_pass_end is not None:
                self.on_pass_end(i, loaded[i] - before)

    def one_pass(self, idx: int) -> Iterator[Any]:
        """Start a pass over a loader and load its first batch."""
        loader, name = self.loaders[idx], self.names[idx]
        if id(loader) in self.started:
            raise ArgumentError(
                f"The {self._what} loader '{name}' is an iterator ({type(loader).__name__}) that "
                "is exhausted, and it is needed again, for another epoch or because it was too "
                "short. " + _RESTARTABLE
            )
        iterator = self.start_pass(idx)
        if iterator is loader:
            self.started.add(id(loader))
        first = next(iterator, _END)
        if first is _END:
            if self._may_be_empty:
                return iter(())
            raise self._no_batches(name)
        return chain(map([first].pop, [0]), iterator)  # popped, so that it is freed

    # Several loaders in turns.

    def _mixed(self, order: LoaderOrder) -> Iterator[_Tuple]:
        sources = [_LoaderEpoch(self, idx) for idx in range(len(self.names))]
        wanted, total = self._mixing.length, self.length()
        if wanted == "shortest":
            # When the end is known, a round need not be loaded ahead.
            ahead = order.round_size if total is None else 1
            return islice(self._whole_rounds(order, sources, ahead), total)
        if self._mixing.on_exhausted == "drop":
            return islice(
                _until_all_dropped(order, sources), wanted if isinstance(wanted, int) else None
            )
        if total is None:
            return _until_all_exhausted(order, sources)
        active = [True] * len(sources)
        return islice((sources[i].load_cycling() for i in order.turns(active)), total)

    def _whole_rounds(
        self, order: LoaderOrder, sources: list[_LoaderEpoch], ahead: int
    ) -> Iterator[_Tuple]:
        turns, has_round = order.turns([True] * len(sources)), False
        while True:
            held: list[_Tuple] = []
            for idx in islice(turns, ahead):
                loaded = sources[idx].load()
                if loaded is None:
                    if not has_round:
                        raise self._no_whole_round()
                    return
                held.append(loaded)
            has_round = True
            while held:  # popped, so that a batch that was yielded is freed
                yield held.pop(0)

    def _no_whole_round(self) -> ArgumentError:
        return ArgumentError(
            f"length='shortest' leaves no batch for a {self._what} epoch: a loader has fewer "
            "batches than one round of the pattern "
            f"{show_value(tuple(self._mixing.pattern or ()))} takes "
            "from it. Use a shorter pattern, length='longest', or a number of batches."
        )


class _LoaderEpoch:
    """One loader within one epoch."""

    def __init__(self, stream: Stream, idx: int) -> None:
        self._stream = stream
        self._idx = idx
        self._name = stream.names[idx]
        self._count = 0
        self._before: int | None = None  # the count at the start of the pass, until it ends
        self._pass: Iterator[Any] | None = None
        self._held: Any = _END
        self._is_ended = False

    def load(self) -> _Tuple | None:
        """Return the next batch of this pass; None at its end."""
        batch, self._held = self._held, _END
        if self._pass is None:
            self._before = self._count
            self._pass = self._stream.one_pass(self._idx)
        if batch is _END:
            batch = self._next_batch()
        if batch is _END:
            self._is_ended = True
            return None
        self._count += 1
        return batch, self._count - 1, self._idx, self._name

    def _next_batch(self) -> Any:
        assert self._pass is not None
        batch = next(self._pass, _END)
        if batch is _END and self._before is not None:
            if self._stream.on_pass_end is not None:
                self._stream.on_pass_end(self._idx, self._count - self._before)
            self._before = None
        return batch

    def load_cycling(self) -> _Tuple:
        """Return the next batch; after the last one, start again."""
        loaded = self.load()
        if loaded is None:
            self._pass = None
            loaded = self.load()
        assert loaded is not None  # an empty pass has raised
        return loaded

    def is_exhausted(self) -> bool:
        """Return whether the loader's last batch was loaded; loads one batch ahead."""
        if self._pass is not None and not self._is_ended and self._held is _END:
            self._held = self._next_batch()
            self._is_ended = self._held is _END
        return self._is_ended


def _until_all_dropped(order: LoaderOrder, sources: list[_LoaderEpoch]) -> Iterator[_Tuple]:
    active = [True] * len(sources)
    for idx in order.turns(active):
        loaded = sources[idx].load()
        if loaded is not None:
            yield loaded
            continue
        active[idx] = False
        if not any(active):
            return


def _until_all_exhausted(order: LoaderOrder, sources: list[_LoaderEpoch]) -> Iterator[_Tuple]:
    turns = order.turns([True] * len(sources))
    while True:
        for idx in islice(turns, order.round_size):
            yield sources[idx].load_cycling()
        if all(source.is_exhausted() for source in sources):
            return
