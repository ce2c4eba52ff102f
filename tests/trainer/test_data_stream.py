"""Several loaders as one stream: what an epoch contains, and what is refused."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hookline.config.trainer_config import MixConfig
from hookline.trainer.data_stream import Stream

WEB = ["w0", "w1", "w2"]
CODE = ["c0"]
TWO = {"web": WEB, "code": CODE}

LENGTHS = st.lists(st.integers(1, 7), min_size=2, max_size=4)
WEIGHTS = st.lists(st.integers(1, 40), min_size=2, max_size=8)
IN_TURNS = ("round_robin", "weighted")  # these may end with the shortest loader


class Unsized:
    """A loader without a length that says when it was started."""

    def __init__(self, batches: list[Any], log: list[str] | None = None, name: str = "") -> None:
        self.batches = batches
        self.log = [] if log is None else log
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        self.log.append(f"iter {self.name}")
        return iter(self.batches)


class Sized(Unsized):
    def __len__(self) -> int:
        return len(self.batches)


def batches(loaders: Any, *args: Any, **settings: Any) -> list[Any]:
    mixing = MixConfig(*args, **settings) if args or settings else None
    return [batch for batch, *_ in Stream(loaders, mixing).epoch()]


def made(lengths: list[int], kind: Callable[[list[Any]], Any] = list) -> dict[str, Any]:
    return {f"l{i}": kind([(i, n) for n in range(length)]) for i, length in enumerate(lengths)}


def mixings(
    count: int, orders: tuple[str, ...], length: st.SearchStrategy[Any]
) -> st.SearchStrategy[MixConfig]:
    """Mixings of so many loaders, in these orders."""
    weights = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    options = {"alternating": {"pattern": patterns(count)}, "weighted": {"weights": weights}}
    on_exhausted = st.sampled_from(["cycle", "drop"])
    return st.one_of(
        st.builds(
            MixConfig,
            st.just(order),
            length=length,
            on_exhausted=on_exhausted,
            **options.get(order, {}),
        )
        for order in orders
    )


def every_mixing(count: int) -> st.SearchStrategy[MixConfig]:
    length = st.sampled_from(["sum", "longest", 1, 4, 25])
    return st.one_of(
        mixings(count, ("sequential", "alternating"), length),
        mixings(count, IN_TURNS, st.one_of(length, st.just("shortest"))),
    )


def patterns(count: int) -> st.SearchStrategy[tuple[str, ...]]:
    """Patterns in which each of so many loaders stands."""
    everyone = st.permutations([f"l{i}" for i in range(count)])
    extra = st.lists(st.sampled_from([f"l{i}" for i in range(count)]), max_size=3)
    return st.tuples(everyone, extra).map(lambda both: (*both[0], *both[1]))


CASES = LENGTHS.flatmap(lambda lengths: st.tuples(st.just(lengths), every_mixing(len(lengths))))


# What a stream is made of.


def test_a_single_loader_gives_its_batches_with_their_numbers() -> None:
    assert list(Stream(["a", "b"]).epoch()) == [
        ("a", 0, 0, "train"),
        ("b", 1, 0, "train"),
    ]


def test_loaders_are_named_by_what_they_are_for_by_number_or_by_the_mapping() -> None:
    loaders = [DataLoader(TensorDataset(torch.arange(n))) for n in (2, 1)]
    stream = Stream(loaders)
    assert stream.names == ["0", "1"]
    assert [name for *_, name in stream.epoch()] == ["0", "0", "1"]
    assert Stream(tuple(loaders)).names == ["0", "1"]
    assert Stream(loaders[0], what="val").names == Stream(loaders[:1], what="val").names == ["val"]
    assert Stream({"own": loaders[0]}, what="val").names == ["own"]


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "one",
    [
        [X, X],
        [(X, X), (X, X)],
        [[X, X], [X, X]],
        [{"input_ids": X}, {"input_ids": X}],
        [{"deep": {"x": X}}],
        [((X, X), X)],
        [(X, None)],
        [np.zeros(2), np.zeros(2)],
        ["text", "text"],
        [1, 2],
        (X, X),
        ((X, X), (X, X)),
    ],
)
def test_a_list_of_batches_is_one_loader(one: Any) -> None:
    stream = Stream(one)
    assert stream.names == ["train"]
    assert len(list(stream.epoch())) == len(one)


@pytest.mark.parametrize(
    "several",
    [
        [DataLoader(TensorDataset(X)), DataLoader(TensorDataset(X))],
        [range(2), range(3)],
        [Unsized([X]), [(X, X)]],
        [[(X, X), (X, X)], [(X, X)]],
        [[{"input_ids": X}], [{"input_ids": X}]],
        (iter([X]), iter([X])),
    ],
)
def test_a_list_of_loaders_is_several(several: Any) -> None:
    assert Stream(several).names == ["0", "1"]


@pytest.mark.parametrize(
    ("doubtful", "position"),
    [
        ([DataLoader(TensorDataset(X)), X], 1),
        ([X, DataLoader(TensorDataset(X))], 1),
        ([((X, X), (X, X)), ((X, X), (X, X))], 0),
        ([[1, 2], [3]], 0),
        ([[range(2)], [range(2)]], 0),
    ],
)
def test_a_list_that_may_be_either_is_refused(doubtful: Any, position: int) -> None:
    with pytest.raises(ValueError, match=rf'element {position}, .*\{{"train": batches\}}'):
        Stream(doubtful)
    assert Stream({"train": doubtful}).names == ["train"]


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("nonsense", [None, 3, "batches", X, Numbers()])
def test_what_is_no_loader_is_refused(nonsense: Any) -> None:
    with pytest.raises(TypeError, match=f"'train' is of type {type(nonsense).__name__}; expected"):
        Stream(nonsense)
    with pytest.raises(TypeError, match=r"val loader 'web' is of type.*into a list: \[batch\]"):
        Stream({"web": nonsense}, what="val")


def test_names_are_strings_and_there_is_one() -> None:
    with pytest.raises(ValueError, match="the name 0; expected a string"):
        Stream({0: WEB})
    with pytest.raises(ValueError, match="expected at least"):
        Stream({})


# What an epoch contains.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # sequential
        ({}, "w0 w1 w2 c0"),
        ({"length": 2}, "w0 w1"),
        ({"length": 6}, "w0 w1 w2 c0 w0 w1"),
        ({"length": 6, "on_exhausted": "drop"}, "w0 w1 w2 c0"),
        # round_robin
        ({"order": "round_robin"}, "w0 c0 w1 c0"),
        ({"order": "round_robin", "on_exhausted": "drop"}, "w0 c0 w1 w2"),
        ({"order": "round_robin", "length": "longest"}, "w0 c0 w1 c0 w2 c0"),
        ({"order": "round_robin", "length": "shortest"}, "w0 c0"),
        ({"order": "round_robin", "length": 9}, "w0 c0 w1 c0 w2 c0 w0 c0 w1"),
        ({"order": "round_robin", "length": 3, "on_exhausted": "drop"}, "w0 c0 w1"),
        ({"order": "round_robin", "length": 9, "on_exhausted": "drop"}, "w0 c0 w1 w2"),
        # alternating
        ({"order": "alternating", "pattern": ("web", "web", "code")}, "w0 w1 c0 w2"),
        ({"order": "alternating", "pattern": ["code", 0]}, "c0 w0 c0 w1"),
        (
            {"order": "alternating", "pattern": (0, 0, 1), "length": "longest"},
            "w0 w1 c0 w2 w0 c0",
        ),
        ({"order": "alternating", "pattern": (0, 0, 1), "length": "shortest"}, "w0 w1 c0"),
        (
            {"order": "alternating", "pattern": (1, 0), "length": 9, "on_exhausted": "drop"},
            "c0 w0 w1 w2",
        ),
        # weighted
        ({"order": "weighted", "weights": {"code": 1, "web": 3}}, "w0 w1 c0 w2"),
        ({"order": "weighted", "weights": [1, 1]}, "w0 c0 w1 c0"),
        ({"order": "weighted", "weights": [1, 1], "length": "longest"}, "w0 c0 w1 c0 w2"),
        ({"order": "weighted", "weights": [1, 1], "length": "shortest"}, "w0 c0 w1"),
        ({"order": "weighted", "weights": [np.float32(0.5)] * 2, "length": 4}, "w0 c0 w1 c0"),
    ],
)
def test_an_epoch_contains_exactly(settings: dict[str, Any], expected: str) -> None:
    stream = Stream(TWO, MixConfig(**settings))
    for _ in range(2):
        assert [batch for batch, *_ in stream.epoch()] == expected.split()
    assert stream.length() == len(expected.split())


def test_weights_are_meant_as_they_are_written() -> None:
    loaders = {"a": ["a"], "b": ["b"], "c": ["c"]}
    drawn = batches(loaders, "weighted", weights=[0.7, 0.2, 0.1], length=1000)
    for end in range(10, 1001, 10):
        assert Counter(drawn[end - 10 : end]) == {"a": 7, "b": 2, "c": 1}
    for tenths in range(1, 10):  # ties included, which the floats themselves would miss
        floats = [tenths / 10, (10 - tenths) / 10]
        whole = [tenths, 10 - tenths]
        assert batches(TWO, "weighted", weights=floats, length=40) == batches(
            TWO, "weighted", weights=whole, length=40
        )


@given(CASES)
def test_the_length_is_the_number_of_batches(case: tuple[list[int], MixConfig]) -> None:
    lengths, mixing = case
    stream = Stream(made(lengths), mixing)
    assert len(list(stream.epoch())) == stream.length()


@given(CASES)
def test_loaders_without_a_length_give_the_same_epoch_up_to_a_round(
    case: tuple[list[int], MixConfig],
) -> None:
    lengths, mixing = case
    unsized = made(lengths, Unsized)
    if mixing.order != "sequential" and (mixing.length, mixing.on_exhausted) == ("sum", "cycle"):
        with pytest.raises(TypeError, match=r"'l0' has no len\(\)"):
            Stream(unsized, mixing)
        return
    expected = list(Stream(made(lengths), mixing).epoch())
    given = list(Stream(unsized, mixing).epoch())
    both = min(len(given), len(expected))
    assert given[:both] == expected[:both]
    by_rounds = mixing.length == "shortest" or (
        (mixing.length, mixing.on_exhausted) == ("longest", "cycle")
        and mixing.order != "sequential"
    )
    size = len(mixing.pattern or lengths) if not mixing.weights else sum(mixing.weights)
    assert abs(len(given) - len(expected)) <= by_rounds * size


@given(LENGTHS, st.sampled_from(["sum", "longest"]), st.data())
def test_without_cycling_every_batch_comes_exactly_once(
    lengths: list[int], length: Any, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths)))
    loaders = made(lengths)
    for mixing in (
        MixConfig(length=length),
        MixConfig("round_robin", length=length, on_exhausted="drop"),
        MixConfig("alternating", (*loaders, "l0"), length=length, on_exhausted="drop"),
        MixConfig("weighted", weights=weights, length=length, on_exhausted="drop"),
    ):
        drawn = [batch for batch, *_ in Stream(loaders, mixing).epoch()]
        assert sorted(drawn) == sorted(batch for own in loaders.values() for batch in own)


@given(WEIGHTS, st.integers(1, 300))
def test_weighted_shares_are_close_after_every_batch_and_exact_after_a_period(
    weights: list[int], length: int
) -> None:
    loaders = {f"l{i}": [i] for i in range(len(weights))}
    counts, total = [0] * len(weights), sum(weights)
    bound = 1 / 2 if len(weights) == 2 else 3 / 2
    for n, batch in enumerate(batches(loaders, "weighted", weights=weights, length=length), 1):
        counts[batch] += 1
        for weight, counted in zip(weights, counts, strict=True):
            assert abs(n * weight / total - counted) <= bound + 1e-9
            assert n % total or counted == n // total * weight


# When loaders are started and read.


@pytest.mark.parametrize("kind", [Unsized, Sized])
@pytest.mark.parametrize(
    "mixing",
    [
        MixConfig(),
        MixConfig("round_robin", length="longest"),
        MixConfig("weighted", weights=[2, 1], on_exhausted="drop"),
        MixConfig("alternating", (0, 0, 1), length="shortest"),
    ],
)
def test_a_loader_is_started_once_per_pass_and_when_its_turn_comes(
    kind: type[Unsized], mixing: MixConfig
) -> None:
    log: list[str] = []
    stream = Stream({n: kind(["x"] * 4, log, n) for n in ("a", "b")}, mixing)
    stream.length()
    epoch = stream.epoch()
    assert log == []
    for drawn in epoch:
        log.append(drawn[3])
    # Each start stands right before the first batch of its pass.
    passes = " ".join(log).replace("iter ", "iter_").split()
    for i, entry in enumerate(passes):
        if entry.startswith("iter_"):
            assert passes[i + 1] == entry.removeprefix("iter_")
    for name in "ab":
        assert log.count(f"iter {name}") == math.ceil(log.count(name) / 4)


def test_an_epoch_of_a_given_length_draws_no_batch_more() -> None:
    def loader() -> Iterator[int]:
        yield 1
        yield 2
        raise AssertionError("one batch too many")

    assert batches(loader(), length=2) == [1, 2]
    assert batches({"a": loader(), "b": loader()}, "round_robin", length=4) == [1, 1, 2, 2]


def test_batches_are_not_kept() -> None:
    def loader() -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield torch.zeros(1)

    for mixing in (
        MixConfig(),
        MixConfig("round_robin", on_exhausted="drop"),
        MixConfig("round_robin", length="shortest"),
    ):
        seen: list[weakref.ref[Any]] = []
        for drawn in Stream({"a": loader(), "b": loader()}, mixing).epoch():
            seen.append(weakref.ref(drawn[0]))
            del drawn
            gc.collect()
            assert sum(ref() is not None for ref in seen) <= 2  # this one, and the loader's own


# Loaders without a length.


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_a_length_that_is_not_known_is_none() -> None:
    stream = Stream({"web": DataLoader(Endless()), "code": [1]})
    assert stream.length() is None
    assert len(list(stream.epoch())) == 7
    assert Stream(Unsized(WEB), MixConfig(length=5)).length() == 5
    assert Stream(Unsized(WEB), MixConfig(length=5, on_exhausted="drop")).length() is None


def test_an_endless_loader_ends_with_the_shortest() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    loaders = {"endless": endless(), "short": Unsized([1, 2])}
    assert batches(loaders, "round_robin", length="shortest") == [0, 1, 0, 2, 0]


# Iterators, which can be gone through once.


def test_a_generator_is_good_for_one_pass() -> None:
    stream = Stream(batch for batch in WEB)
    assert [batch for batch, *_ in stream.epoch()] == WEB
    with pytest.raises(TypeError, match=r"'train' has no batches.*an iterator"):
        next(stream.epoch())


# Empty loaders.


def test_an_empty_loader_is_refused_at_once_where_its_length_says_so() -> None:
    small = DataLoader(TensorDataset(torch.arange(3)), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"val loader 'code' has no batches.*drop_last=True"):
        Stream({"web": WEB, "code": small}, what="val")


# Settings that make no sense.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "round_robbin"}, "'order' is 'round_robbin'.* 'round_robin'"),
        ({"length": 0}, "length.* is 0. .* greater than 0"),
        ({"length": True}, "length.* is True"),
        ({"pattern": ("web",)}, "order is 'sequential'; expected pattern with order='alternating'"),
        ({"order": "alternating"}, "order is 'alternating'; expected pattern"),
        ({"order": "alternating", "pattern": (True, 0)}, "pattern.0.* is True"),
        ({"order": "weighted", "weights": [1, 0]}, "weights.*1' is 0. .* greater than 0"),
        ({"order": "weighted", "weights": [math.nan]}, "weights.*0' is nan"),
    ],
)
def test_a_mixing_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        MixConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": ("web", "cod")}, "loader 'cod'; .*Did you mean 'code'"),
        ({"pattern": ("web", 2)}, "names the loader '2'; expected 'web', 'code'"),
        ({"pattern": ("web",)}, "pattern has nothing for 'code'"),
        ({"weights": {"web": 1}}, "weights has nothing for 'code'"),
        ({"weights": [1, 2, 3]}, "weights names the loader '2'"),
        ({"length": "shortest"}, "'shortest' with order='sequential'"),
        ({"pattern": (0, 1, 1), "length": "shortest"}, "leaves no batch for a train epoch"),
    ],
)
def test_a_mixing_that_does_not_fit_the_loaders_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    order = {"pattern": "alternating", "weights": "weighted"}
    settings["order"] = next((order[key] for key in settings if key in order), "sequential")
    with pytest.raises(ValueError, match=message):
        Stream(TWO, MixConfig(**settings))
