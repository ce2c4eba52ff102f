"""Several loaders as one stream of batches, the same in every epoch and after every resume.

What an epoch contains is decided by three settings of `MixConfig`:

`order` says whose turn it is, and what a *round* is:

| order | turns | a round |
|---|---|---|
| `"sequential"` | a loader from its first batch to its last, then the next | all loaders |
| `"round_robin"` | one batch from each loader | one batch from each |
| `"alternating"` | `pattern`, again and again | one pattern |
| `"weighted"` | by `weights`, as exact quotas | one batch |

`length` says where the epoch ends, and `on_exhausted` what happens to a loader that has run out
before:

| length | `on_exhausted="cycle"`: start it again | `on_exhausted="drop"`: leave it out |
|---|---|---|
| `"sum"` | as many batches as all loaders have together | each batch exactly once |
| `"longest"` | the fewest whole rounds that take each loader to its end | each batch exactly once |
| `"shortest"` | the most whole rounds before any loader would start again | the same |
| a number | so many batches | so many, or each batch once if that is fewer |

So with loaders of 3 and 1 batches, round-robin: `"longest"` has 6 batches, `"shortest"` has 2.
"sequential" goes through every loader once: "sum" and "longest" are the same, "shortest" is
refused, and only a number larger than the sum starts over, with the first loader. Every epoch
starts every loader from its beginning, also when the last epoch did not reach the loader's end.

`iter(loader)` is called once per pass over a loader, when the first batch of that pass is due and
not earlier: a DataLoader draws its seed from torch's random numbers there. Only where an end can
be found by running out alone, because a loader has no `len()`, is a batch taken from a running
loader before its turn: one per loader at the end of a round ("longest"), or one round
("shortest"; with weights, none).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count, cycle, islice, repeat
from numbers import Real
from typing import Any, Final, Literal, NamedTuple, cast, get_args

from hookline.errors import listed, nearest

__all__ = ["LoadedBatch", "MixConfig", "Stream"]

Order = Literal["sequential", "round_robin", "alternating", "weighted"]
Length = Literal["sum", "longest", "shortest"]
OnExhausted = Literal["cycle", "drop"]

_END: Final = object()


@dataclass(frozen=True)
class MixConfig:
    """How several loaders become one stream; the module's tables define each combination.

    Args:
        order: whose turn it is.
        pattern: for "alternating": loaders by name or number, repeated: `("web", "web", "code")`.
        weights: for "weighted": a positive number for each loader, by name or in the loaders'
            order; they need not add up to 1. After every batch of the epoch each of N loaders is
            within 1 - 1/(2N - 2) batches of its share (half a batch for two loaders), without
            random numbers. When a loader is left out, the others share the rest by their
            weights, counted from there.
        length: where an epoch ends: a number of batches, or by the loaders' lengths.
        on_exhausted: a loader that runs out is started again ("cycle") or left out for the rest
            of the epoch ("drop").

    Example:
        >>> web, code = ["w0", "w1", "w2"], ["c0"]
        >>> stream = Stream({"web": web, "code": code}, MixConfig("round_robin", length="longest"))
        >>> [drawn.batch for drawn in stream.epoch()]
        ['w0', 'c0', 'w1', 'c0', 'w2', 'c0']
    """

    order: Order = "sequential"
    pattern: tuple[str | int, ...] | None = None
    weights: Mapping[str, float] | Sequence[float] | None = None
    length: Length | int = "sum"
    on_exhausted: OnExhausted = "cycle"

    def __post_init__(self) -> None:
        _check_word("order", self.order, get_args(Order))
        _check_word("on_exhausted", self.on_exhausted, get_args(OnExhausted))
        _check_length(self.length)
        _check_belongs("pattern", self.pattern, "alternating", self.order)
        _check_belongs("weights", self.weights, "weighted", self.order)
        # Frozen all the way: copies, so that nobody changes them behind the checks.
        if self.pattern is not None:
            object.__setattr__(self, "pattern", _checked_pattern(self.pattern))
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights))


_Tuple = tuple[Any, int, int, str]


class LoadedBatch(NamedTuple):
    """One batch and where it comes from.

    `batch_idx` counts within its loader and epoch, from 0, and goes on when a loader is started
    again.
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
            `__iter__`. An iterator, such as a generator, can be gone through only once, and a
            second pass over it is refused.

            A list or tuple is several loaders if each element is one: an object with `__iter__`
            that is no array, string or mapping, or a list of such batches as hold tensors (a list
            of tuples, lists or mappings of tensors). It is one loader, a list of batches, if each
            element is a batch: a tensor or array, a mapping, a string, an object without
            `__iter__`, or a tuple or list with a tensor in it. Everything else is refused, and a
            mapping says what is meant: `{"train": batches}` or `{"a": first, "b": second}`.
        mixing: how several become one.
        what: the name of a loader that is alone and has none: "train" or "val".

    Attributes:
        names: the loaders' names, in order.
        on_pass_start: called with a loader's number before each `iter(loader)`.

    Raises:
        TypeError: something is no loader, or lacks a length that the mixing needs.
        ValueError: a loader is empty, or the mixing does not fit the loaders.
    """

    names: list[str]

    def __init__(
        self, loaders: Iterable[Any], mixing: MixConfig | None = None, *, what: str = "train"
    ) -> None:
        named = _named(loaders, what)
        self.names = list(named)
        self.loaders = list(named.values())
        self._mixing = mixing or MixConfig()
        self._what = what
        self.on_pass_start: Callable[[int], None] | None = None
        self._begun: set[int] = set()  # iterators that cannot be started again, by id
        self._turns = _turns(self._mixing, self.names)
        self._check()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        length = self.length()
        if length is None:
            unknown = [n for n, own in zip(self.names, self._lengths(), strict=True) if own is None]
            raise TypeError(
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
        if self._turns is None or wanted == "sum" or (wanted == "longest" and drop):
            return sum(known)
        return self._turns.longest(known) if wanted == "longest" else self._turns.shortest(known)

    def epoch(self, skip: int = 0) -> Iterator[LoadedBatch]:
        """Go through one epoch.

        Args:
            skip: so many batches are drawn and dropped before the first that is given, to go on
                where an interrupted epoch stopped.
        """
        if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
            raise ValueError(f"skip is {skip!r}; expected a number of batches, 0 or more.")
        batches = map(LoadedBatch._make, self.tuples())
        return islice(batches, skip, None) if skip else batches

    def tuples(self) -> Iterator[_Tuple]:
        """Iterate over one epoch as plain tuples with the fields of `LoadedBatch`."""
        return self._in_sequence() if self._turns is None else self._mixed(self._turns)

    def _check(self) -> None:
        lengths = self._lengths()
        for name, length in zip(self.names, lengths, strict=True):
            if length == 0:
                raise _empty(self._what, name)
        if self._turns is None:
            if len(self.names) > 1 and self._mixing.length == "shortest":
                raise ValueError(
                    "length='shortest' with order='sequential' would never reach the later "
                    "loaders; expected length 'sum' or a number, or another order, such as "
                    "'round_robin'."
                )
        elif (
            self._mixing.length == "sum"
            and self._mixing.on_exhausted == "cycle"
            and None in lengths
        ):
            raise TypeError(
                f"length='sum' with on_exhausted='cycle' needs the length of every {self._what} "
                "loader, "
                f"and '{self.names[lengths.index(None)]}' has no len(). Give it a `__len__`, or "
                "use on_exhausted='drop', length='longest', or a number of batches as length."
            )
        elif self._mixing.length == "shortest" and self.length() == 0:
            raise self._no_whole_round()

    def _lengths(self) -> list[int | None]:
        return [_length_of(loader) for loader in self.loaders]

    # One loader after the other. A single loader comes here too, whatever the order.

    def _in_sequence(self) -> Iterator[_Tuple]:
        wanted, numbers = self._mixing.length, [count() for _ in self.names]
        once = range(len(self.names))
        if not isinstance(wanted, int):
            return self._one_after_another(once, numbers)
        order = once if self._mixing.on_exhausted == "drop" else cycle(once)
        return islice(self._one_after_another(order, numbers), wanted)

    def _one_after_another(
        self, order: Iterable[int], numbers: list[count[int]]
    ) -> Iterator[_Tuple]:
        # The hot path of a trainer: no Python code runs between two batches of a loader, and `zip`
        # gives the same tuple again when nobody has kept it.
        return chain.from_iterable(
            zip(self._one_pass(i), numbers[i], repeat(i), repeat(self.names[i])) for i in order
        )

    def _one_pass(self, idx: int) -> Iterator[Any]:
        """Begin to go through a loader once: its first batch is drawn."""
        loader, name = self.loaders[idx], self.names[idx]
        if id(loader) in self._begun:
            raise _used_up(self._what, name, loader)
        if self.on_pass_start is not None:
            self.on_pass_start(idx)
        iterator = iter(loader)
        if iterator is loader:
            self._begun.add(id(loader))
        first = next(iterator, _END)
        if first is _END:
            raise _empty(self._what, name)
        return chain(map([first].pop, [0]), iterator)  # popped: else it would stay in memory

    # In turns.

    def _mixed(self, turns: _Turns) -> Iterator[_Tuple]:
        sources = [_Source(self, idx) for idx in range(len(self.names))]
        wanted, total = self._mixing.length, self.length()
        if wanted == "shortest":
            # When the end is known, there is no need to have a whole round in hand.
            ahead = turns.round_size if total is None else 1
            return islice(self._while_all_last(turns, sources, ahead), total)
        if self._mixing.on_exhausted == "drop":
            return islice(
                _until_all_dropped(turns, sources), wanted if isinstance(wanted, int) else None
            )
        if total is None:
            return _until_all_through(turns, sources)
        everyone = [True] * len(sources)
        return islice((sources[i].draw_again() for i in turns.among(everyone)), total)

    def _while_all_last(
        self, turns: _Turns, sources: list[_Source], ahead: int
    ) -> Iterator[_Tuple]:
        order, some = turns.among([True] * len(sources)), False
        while True:
            held: list[_Tuple] = []
            for idx in islice(order, ahead):
                drawn = sources[idx].draw()
                if drawn is None:
                    if not some:
                        raise self._no_whole_round()
                    return
                held.append(drawn)
            some = True
            while held:  # emptied as it goes: a batch that was handed over is not kept
                yield held.pop(0)

    def _no_whole_round(self) -> ValueError:
        return ValueError(
            f"length='shortest' leaves no batch for a {self._what} epoch: a loader has fewer "
            f"batches than one round of the pattern {self._mixing.pattern!r} takes from it. Use a "
            "shorter pattern, length='longest', or a number of batches."
        )


class _Source:
    """One loader within one epoch."""

    def __init__(self, stream: Stream, idx: int) -> None:
        self._stream = stream
        self._idx = idx
        self._name = stream.names[idx]
        self._count = 0
        self._pass: Iterator[Any] | None = None
        self._held: Any = _END
        self._ended = False

    def draw(self) -> _Tuple | None:
        """The next batch of this pass; None at its end."""
        batch, self._held = self._held, _END
        if self._pass is None:
            self._pass = self._stream._one_pass(self._idx)
        if batch is _END:
            batch = next(self._pass, _END)
        if batch is _END:
            self._ended = True
            return None
        self._count += 1
        return batch, self._count - 1, self._idx, self._name

    def draw_again(self) -> _Tuple:
        """The next batch, the first one again after the last."""
        drawn = self.draw()
        if drawn is None:
            self._pass = None
            drawn = self.draw()
        assert drawn is not None  # an empty pass has raised
        return drawn

    def through(self) -> bool:
        """Whether the loader's last batch has been drawn. Looks one batch ahead."""
        if self._pass is not None and not self._ended and self._held is _END:
            self._held = next(self._pass, _END)
            self._ended = self._held is _END
        return self._ended


def _until_all_dropped(turns: _Turns, sources: list[_Source]) -> Iterator[_Tuple]:
    alive = [True] * len(sources)
    for idx in turns.among(alive):
        drawn = sources[idx].draw()
        if drawn is not None:
            yield drawn
            continue
        alive[idx] = False
        if not any(alive):
            return


def _until_all_through(turns: _Turns, sources: list[_Source]) -> Iterator[_Tuple]:
    order = turns.among([True] * len(sources))
    while True:
        for idx in islice(order, turns.round_size):
            yield sources[idx].draw_again()
        if all(source.through() for source in sources):
            return


# Whose turn it is.


class _Pattern:
    """Loaders by number, again and again. Round-robin is one pattern of many."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = pattern
        self._shares = [pattern.count(idx) for idx in range(max(pattern) + 1)]
        self.round_size = len(pattern)

    def among(self, alive: list[bool]) -> Iterator[int]:
        """The turns, without end, of the loaders that are alive when asked."""
        return (idx for idx in cycle(self._pattern) if alive[idx])

    def longest(self, lengths: list[int]) -> int:
        rounds = (-(-own // share) for own, share in zip(lengths, self._shares, strict=True))
        return max(rounds) * self.round_size

    def shortest(self, lengths: list[int]) -> int:
        rounds = (own // share for own, share in zip(lengths, self._shares, strict=True))
        return min(rounds) * self.round_size


class _Quotas:
    """Loaders by weight: whole numbers without a common factor, so that a period is their sum."""

    round_size = 1

    def __init__(self, weights: list[int]) -> None:
        self._weights = weights

    def among(self, alive: list[bool]) -> Iterator[int]:
        """The turns, without end, of the loaders that are alive when asked."""
        while True:
            fire = [idx for idx, lives in enumerate(alive) if lives]
            for turn in _by_quota([self._weights[idx] for idx in fire]):
                yield fire[turn]
                if not all(alive[idx] for idx in fire):
                    break

    def longest(self, lengths: list[int]) -> int:
        return max(self._turn_of_each(lengths))

    def shortest(self, lengths: list[int]) -> int:
        return min(self._turn_of_each([own + 1 for own in lengths])) - 1

    def _turn_of_each(self, nth: list[int]) -> list[int]:
        """After how many turns each loader has had its n-th. Looks at one period at most."""
        period = sum(self._weights)
        cuts = [divmod(n - 1, weight) for n, weight in zip(nth, self._weights, strict=True)]
        left = {idx: rest + 1 for idx, (_, rest) in enumerate(cuts)}
        found = [whole * period for whole, _ in cuts]
        for turn, idx in enumerate(_by_quota(self._weights), 1):
            if idx in left:
                left[idx] -= 1
                if not left[idx]:
                    del left[idx]
                    found[idx] += turn
            if not left:
                break
        return found


_Turns = _Pattern | _Quotas


def _by_quota(weights: Sequence[int]) -> Iterator[int]:
    """Give turns so that each has its share at every context, to less than one turn.

    The largest deficit first does not do it: with many, several fall due at once, and one of
    them is more than a turn behind (1.08 for the weights 3, 3, 1, 25, 30, 1). Tijdeman's rule
    (The chairman assignment problem, 1980) does: of those that are at least 1/(2N - 2) of a turn
    behind, the one that would be 1 - 1/(2N - 2) behind first. For two, it is the largest deficit.
    """
    total, parts = sum(weights), max(2 * len(weights) - 2, 1)
    had = [0] * len(weights)
    deadlines = [Fraction(parts - 1, weight) for weight in weights]
    for turn in count(1):
        due = (
            idx
            for idx, weight in enumerate(weights)
            if (turn * weight - had[idx] * total) * parts >= total
        )
        pick = min(due, key=deadlines.__getitem__)
        yield pick
        had[pick] += 1
        deadlines[pick] = Fraction(had[pick] * parts + parts - 1, weights[pick])


def _turns(mixing: MixConfig, names: list[str]) -> _Turns | None:
    """Whose turn it is; None where there are no turns to take."""
    turns: _Turns | None = None
    if mixing.pattern is not None:
        turns = _Pattern(_resolved_pattern(mixing.pattern, names))
    elif mixing.weights is not None:
        turns = _Quotas(_whole(_resolved_weights(mixing.weights, names)))
    elif mixing.order == "round_robin":
        turns = _Pattern(range(len(names)))
    return turns if len(names) > 1 else None


def _resolved_pattern(pattern: tuple[str | int, ...], names: list[str]) -> list[int]:
    for entry in pattern:
        if isinstance(entry, str):
            _check_name("pattern", entry, names)
        elif not 0 <= entry < len(names):
            raise ValueError(
                f"pattern has loader number {entry}; expected 0 to {len(names) - 1}, or one of "
                f"{listed(names)}."
            )
    resolved = [names.index(entry) if isinstance(entry, str) else entry for entry in pattern]
    missing = [name for idx, name in enumerate(names) if idx not in resolved]
    if missing:
        raise ValueError(
            f"pattern {pattern!r} never draws from {listed(missing)}; expected every loader in it. "
            "Add what is missing, or do not pass that loader."
        )
    return resolved


def _resolved_weights(
    weights: Mapping[str, float] | Sequence[float], names: list[str]
) -> list[float]:
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ValueError(
                f"weights has {len(weights)} numbers; expected {len(names)}, one for each of "
                f"{listed(names)}."
            )
        return list(weights)
    for name in weights:
        _check_name("weights", name, names)
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(
            f"weights has no number for {listed(missing)}; expected one for each of "
            f"{listed(names)}."
        )
    return [weights[name] for name in names]


def _whole(weights: list[float]) -> list[int]:
    """The same proportions in whole numbers. 0.7 means seven tenths, not the float next to it."""
    exact = [Fraction(w) if isinstance(w, int) else Fraction(repr(float(w))) for w in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]


# What counts as a loader.


def _named(loaders: Any, what: str) -> dict[str, Any]:
    """The loaders by name."""
    if isinstance(loaders, Mapping):
        named = dict(loaders)
    elif isinstance(loaders, list | tuple) and _holds_loaders(loaders, what):
        alone = len(loaders) == 1
        named = {what if alone else str(idx): loader for idx, loader in enumerate(loaders)}
    else:
        named = {what: loaders}
    if not named:
        raise ValueError(f"There are no {what} loaders: the mapping is empty; expected at least 1.")
    for name, loader in named.items():
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"A {what} loader has the name {name!r}; expected a string that is not empty."
            )
        if not _may_be_loader(loader):
            raise TypeError(
                f"The {what} loader '{name}' is of type {type(loader).__name__}; expected an "
                "object whose `__iter__` gives batches, such as a DataLoader or a list of batches. "
                "A dataset goes into a DataLoader, a single batch into a list: [batch]."
            )
    return named


def _holds_loaders(several: Sequence[Any], what: str) -> bool:
    """Whether a list holds loaders (else: batches)."""
    kinds = [_kind(one) for one in several]
    if several and kinds.count("loader") == len(several):
        return True
    if kinds.count("batch") == len(several):
        return False
    odd = next(i for i, kind in enumerate(kinds) if kind == "doubt" or kind != kinds[0])
    raise ValueError(
        f"The {what} {type(several).__name__} may be a list of loaders or a list of batches: "
        f"element {odd}, of type {type(several[odd]).__name__}, does not tell. Say which with a "
        f'mapping: {{"{what}": batches}} for one loader, {{"a": first, "b": second}} for several.'
    )


def _kind(one: Any) -> Literal["loader", "batch", "doubt"]:
    """What an element of a list is."""
    if not _may_be_loader(one):
        return "batch"
    if not isinstance(one, list | tuple):
        return "loader"
    if any(_is_array(item) for item in one):
        return "batch"
    of_batches = all(_holds_arrays(item) for item in one)
    # A tuple of tuples of tensors is as likely a batch as it is a loader.
    return "loader" if of_batches and isinstance(one, list) else "doubt"


def _may_be_loader(one: Any) -> bool:
    # Without `__iter__`, Python would go through a dataset by its numbers, sample by sample.
    return hasattr(type(one), "__iter__") and not (
        isinstance(one, Mapping | str | bytes) or _is_array(one)
    )


def _is_array(one: Any) -> bool:
    """Whether it is a tensor or an array of any library."""
    return hasattr(type(one), "__array__")


def _holds_arrays(one: Any) -> bool:
    items = one.values() if isinstance(one, Mapping) else one
    return isinstance(one, Mapping | list | tuple) and any(_is_array(item) for item in items)


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader over a stream has a len() that raises
        return None


# Errors and checks.


def _empty(what: str, name: str) -> ValueError:
    return ValueError(
        f"The {what} loader '{name}' has no batches; expected at least one. Is its dataset empty, "
        "or smaller than one batch with drop_last=True?"
    )


def _used_up(what: str, name: str, loader: Any) -> TypeError:
    return TypeError(
        f"The {what} loader '{name}' is an iterator ({type(loader).__name__}) that has been gone "
        "through, and it is needed again, for another epoch or because it was too short. Pass "
        "something that can be started again: a DataLoader, a list (`list(iterator)`, if it fits "
        "in memory), or an object whose `__iter__` makes a new iterator."
    )


def _check_word(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        hint = nearest(value, known) if isinstance(value, str) else ""
        raise ValueError(f"{name} is {value!r}; expected one of {listed(known)}.{hint}")


def _check_name(where: str, name: Any, names: list[str]) -> None:
    if name not in names:
        hint = nearest(name, names) if isinstance(name, str) else ""
        raise ValueError(f"{where} names the loader {name!r}; expected {listed(names)}.{hint}")


def _check_length(value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    known = get_args(Length)
    if value not in known:
        hint = nearest(value, known) if isinstance(value, str) else ""
        raise ValueError(
            f"length is {value!r}; expected one of {listed(known)}, or a whole number of batches "
            f"of at least 1.{hint}"
        )


def _check_belongs(name: str, value: Any, to: str, order: str) -> None:
    if value is None and order == to:
        raise ValueError(f"order='{to}' needs {name}; expected MixConfig('{to}', {name}=...).")
    if value is not None and order != to:
        raise ValueError(
            f"{name} is {value!r} with order='{order}'; expected {name} with order='{to}' only."
        )


def _checked_pattern(pattern: Any) -> tuple[str | int, ...]:
    if not isinstance(pattern, list | tuple) or not pattern:
        raise ValueError(
            f"pattern is {pattern!r}; expected at least one loader, by name or number, in a "
            "tuple, such as ('web', 'web', 'code')."
        )
    for entry in pattern:
        if isinstance(entry, bool) or not isinstance(entry, str | int):
            raise ValueError(  # noqa: TRY004  a wrong setting, whatever is wrong with it
                f"pattern has {entry!r}; expected loaders by name or number."
            )
    return tuple(pattern)


def _checked_weights(weights: Any) -> dict[str, float] | tuple[float, ...]:
    if not isinstance(weights, Mapping | list | tuple):
        raise ValueError(  # noqa: TRY004  a wrong setting, whatever is wrong with it
            f"weights is {weights!r}; expected a mapping from loader to number, or a list of "
            "numbers."
        )
    copy: dict[str, Any] | tuple[Any, ...] = (
        dict(weights) if isinstance(weights, Mapping) else tuple(weights)
    )
    for where, weight in copy.items() if isinstance(copy, dict) else enumerate(copy):
        number: Any = None if isinstance(weight, bool) else weight
        if not isinstance(number, Real) or not 0 < cast("float", number) < math.inf:
            raise ValueError(
                f"weights[{where!r}] is {weight!r}; expected a number above 0 that is finite. To "
                "leave a loader out, do not pass it."
            )
    return copy
