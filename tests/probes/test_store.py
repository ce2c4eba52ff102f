"""Captured states: what they hold, and the limits within which they are kept."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, fields
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.probes.store import CapturedState, Counts, Store
from hookline.tensors.nested import NotCopied, map_tensors, tensors_in

KB = 1024


def tensor(kilobytes=1, value=0.0):
    return torch.full((kilobytes * KB // 4,), float(value))


def state(value=0.0, kilobytes=1, **contents):
    """A state that can be told by its number, and takes so many kilobytes."""
    return CapturedState(
        "layer", step=int(value), **(contents or {"output": tensor(kilobytes, value)})
    )


def steps(store, probe="p"):
    return [s.step for s in store.states(probe)]


# -- nested values

Pair = namedtuple("Pair", "left right")


@dataclass
class Data:
    a: Any
    b: Any = None
    later: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any = 7


class ModelOutput(OrderedDict):
    """As in Hugging Face's transformers: a dataclass and an ordered dict at once."""

    def __post_init__(self):
        for f in fields(self):
            if getattr(self, f.name) is not None:
                self[f.name] = getattr(self, f.name)

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        return type(self), tuple(getattr(self, f.name) for f in fields(self))


@dataclass
class Output(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


class Layer:
    def __init__(self, keys, values):
        self.keys, self.values = keys, values


class Cache:
    """As in Hugging Face's transformers: its layers hold the tensors."""

    def __init__(self, *layers):
        self.layers = list(layers)
        self.length = len(layers)

    def __len__(self):
        return self.length

    def __getattr__(self, name):
        raise RuntimeError("none of its code is to run")

    __setattr__ = object.__setattr__
    __copy__ = __reduce_ex__ = __getattr__


class Slotted:
    __slots__ = ("__own", "never", "t")

    def __init__(self, t):
        self.t = self.__own = t


class SlottedMore(Slotted):
    def __init__(self, t):
        super().__init__(t)
        self.more = [t]


class Handle:
    """Frees what it has when it goes."""

    def __init__(self, t):
        self.t = t

    def __del__(self):
        if isinstance(self.t, torch.Tensor):
            self.t.zero_()


def rich_values(t):
    data = Data([t], {"x": t})
    return {
        "tuple": (t, 1, "a", None),
        "list": [t, [t, (t,)]],
        "dict": {"x": t, 3: {"y": t}},
        "named tuple": Pair(t, (t, 2)),
        "torch's own tuple": t.reshape(2, -1).max(0),
        "dataclass": data,
        "frozen dataclass": Frozen(t),
        "ordered dict": OrderedDict(b=t, a=t),
        "default dict": defaultdict(list, a=t),
        "user dict": UserDict(a=t),
        "read-only mapping": MappingProxyType({"a": t}),
        "model output": Output(logits=t, hidden=(t, t)),
        "packed": torch.nn.utils.rnn.pack_sequence([t[:2], t[:1]]),
        "deque": deque([t, 1], maxlen=3),
        "set": {t},
        "frozen set": frozenset([t]),
        "object": Layer(t, (t, 2)),
        "cache": Cache(Layer(t, t + 1), Layer(t + 2, t + 3)),
        "namespace": SimpleNamespace(t=t, other={"x": t}),
        "slots": Slotted(t),
        "slots and more": SlottedMore(t),
        "distribution": torch.distributions.Normal(t, torch.ones(8)),
    }


@pytest.mark.parametrize("kind", rich_values(torch.ones(8)))
def test_tensors_are_replaced_within_values_that_keep_their_types(kind):
    value = rich_values(torch.ones(8))[kind]
    before = [t.clone() for t in tensors_in(value)]
    assert before
    new = map_tensors(value, lambda t: t + 1)
    expected = dict if kind == "read-only mapping" else type(value)
    assert type(new) is expected or kind == "read-only mapping"
    assert [t.tolist() for t in tensors_in(new)] == [(t + 1).tolist() for t in before]
    assert [t.tolist() for t in tensors_in(value)] == [t.tolist() for t in before]
    order = []
    map_tensors(value, lambda t: order.append(id(t)) or t)
    assert order == list(dict.fromkeys(map(id, tensors_in(value))))


def test_what_holds_no_tensors_is_left_as_it_is():
    nothing = (None, 3, "a", (1, (2,)), torch.Size([2]), object(), Counter("ab"), deque([1]))
    many = Layer(dict.fromkeys(range(2000)), [])
    for value in (*nothing, Handle(1), torch.Generator(), many, Empty()):
        assert map_tensors(value, lambda t: 1 / 0) is value


class Empty:
    pass


def test_a_cache_that_the_model_goes_on_filling_is_copied_also_while_it_is_empty():
    for value in (Cache(Layer(None, None)), Cache(Layer(None, torch.ones(1)))):
        new = map_tensors(value, torch.clone)
        value.layers[0].keys = torch.zeros(1)
        value.layers.append(Layer(1, 2))
        assert type(new) is Cache
        assert len(new.layers) == 1
        assert new.layers[0].keys is None


def test_collections_that_contain_themselves_are_copied_once():
    t = torch.ones(2)
    values, table = [t], {"t": t}
    values += [values, values, table]
    table["table"], table["values"] = table, [values, (table, table)]
    assert [*tensors_in(values)] == [t, t]
    new = map_tensors(values, torch.neg)
    assert new[1] is new[2] is new is not values
    assert new[3]["table"] is new[3] is not table
    assert new[3]["values"][0] is new
    assert torch.equal(new[3]["values"][1][0]["t"], -t)


def test_an_object_that_cannot_be_copied_is_named_instead():
    t = torch.ones(1)
    new = map_tensors([Handle(t), t], torch.clone)
    assert new[0] == NotCopied(f"{__name__}.Handle")
    assert "Handle" in repr(new[0])
    assert t == 0  # only the one that was given has gone


def test_a_tensor_in_several_places_is_replaced_once_and_stays_one():
    t = torch.ones(2)
    calls = []
    new = map_tensors([t, {"a": t}, torch.zeros(2)], lambda t: calls.append(0) or t.clone())
    assert new[0] is new[1]["a"]
    assert len(calls) == 2
    memo: dict = {}
    assert map_tensors(t, torch.clone, memo) is map_tensors([t], torch.clone, memo)[0]


# -- one state


def test_a_state_is_a_mapping_too():
    t = torch.ones(2)
    s = CapturedState("a.b", "probe", 3, output=t)
    assert s["output"] is s.output is t
    assert s.get("nothing", 5) == 5
    assert "output" in s
    assert dict(s)["step"] == 3
    assert list(s) == [f.name for f in fields(CapturedState)]
    with pytest.raises(KeyError):
        s["nbytes"]
    assert s == s
    assert s != CapturedState("a.b", "probe", 3, output=t)
    assert len({s, s}) == 1


def test_a_state_shows_shapes_instead_of_values():
    s = CapturedState("mlp", "p", 3, call=1, input=(torch.ones(2, 3),), output={"x": torch.ones(1)})
    assert repr(s) == (
        "CapturedState('mlp', probe='p', step=3, call=1, "
        "input=(float32[2, 3],), output={'x': float32[1]})"
    )


def test_memory_is_counted_once_and_whole_under_views():
    whole = tensor(8)
    assert state(output=whole[:1]).nbytes == 8 * KB
    assert state(output=(whole[:1], whole[5:], whole.view(2, -1).T)).nbytes == 8 * KB
    assert state(input=whole, output=(whole, tensor(1))).nbytes == 9 * KB
    assert state(output=torch.empty(0)).nbytes == 0
    assert state(output=torch.empty(100, device="meta")).nbytes == 0
    assert state(output=torch.ones(1).expand(1000)).nbytes == 4


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")
def test_memory_of_sparse_and_composed_tensors_is_counted():
    dense = torch.eye(4)
    assert state(output=dense.to_sparse()).nbytes == 4 * 4 + 2 * 4 * 8
    compressed = (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), (2, 2))
    for kind in (torch.sparse_csr_tensor, torch.sparse_csc_tensor):
        assert (
            state(output=kind(*compressed, check_invariants=True)).nbytes == 3 * 8 + 2 * 8 + 2 * 4
        )
    jagged = torch.nested.nested_tensor([dense, dense[:2]], layout=torch.jagged)
    assert state(output=jagged).nbytes == 6 * 16 + 3 * 8
    assert state(output=dense.to_mkldnn()).nbytes == 64


# -- the store


def test_a_state_that_alone_is_too_large_is_dropped_and_said_once(caplog):
    store = Store(memory_limit=2 * KB)
    store.add("p", state(0))
    with caplog.at_level(logging.WARNING, "hookline"):
        store.add("p", state(1, kilobytes=3))
        store.add("p", state(2, kilobytes=3))
    assert steps(store) == [0]
    assert store.counts("p") == Counts(captured=3, kept=1, dropped=2)
    assert len(caplog.records) == 1
    assert "drops captured states that do not fit" in caplog.text
    store.add("p", state(3, kilobytes=2))  # just fits
    assert steps(store) == [3]


def test_what_is_dropped_or_cleared_is_freed():
    store = Store(max_states=2)
    alive = []
    for i in range(8):
        value = tensor(1, i)
        alive.append(weakref.ref(value.untyped_storage()))
        alive.append(weakref.ref(value))
        store.add("p", state(i, output=[value]))
        del value
    kept = store.counts("p").kept
    assert sum(ref() is not None for ref in alive) == 2 * kept == 4
    store.clear("p")
    assert not any(ref() is not None for ref in alive)


# -- clear, forget, close


def test_threads_lose_and_mix_nothing():
    store = Store(memory_limit=16 * KB)
    over, errors = [], []

    def capture(probe):
        try:
            for i in range(60):
                store.add(probe, CapturedState(probe, probe, i, output=tensor(1, i)))
                if i % 7 == 0:
                    for s in store.states(probe):
                        assert (s.module, s.output[0].item()) == (probe, s.step)
        except BaseException as error:
            errors.append(error)

    def watch():
        while any(thread.is_alive() for thread in threads):
            over.append(store.nbytes > 16 * KB)

    threads = [threading.Thread(target=capture, args=(f"p{i}",)) for i in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in threads:
        thread.start()
    watcher.start()
    for thread in (*threads, watcher):
        thread.join()
    assert not errors
    assert not any(over)
    for i in range(4):
        counts = store.counts(f"p{i}")
        assert counts.captured == 60 == counts.kept + counts.dropped
        kept = steps(store, f"p{i}")
        assert kept == sorted(set(kept))
    assert store.nbytes == KB * store.counts().kept


# -- any sequence of calls

ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.sampled_from("pqr"),
            # which pool tensors, and from where the view begins
            st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=3),
        ),
        st.tuples(st.just("own"), st.sampled_from("pqr"), st.integers(0, 6)),
        st.tuples(st.just("amend"), st.integers(0, 40), st.integers(0, 5)),
        st.tuples(st.just("clear"), st.sampled_from(["p", "q", "r", None])),
        st.tuples(st.just("forget"), st.sampled_from("pqr")),
    ),
    max_size=40,
)


def exact(store):
    """The bytes of all that is in memory, counted anew."""
    seen = {}
    for probe in store._counts:
        for kept in store.states(probe):
            for t in kept.tensors():
                storage = t.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
    seen.pop(0, None)
    return sum(seen.values())


@settings(deadline=None, max_examples=150)
@given(
    actions=ACTIONS,
    max_states=st.one_of(st.none(), st.integers(1, 5)),
    limit=st.one_of(st.none(), st.integers(1, 12)),
    interval=st.integers(1, 4),
)
def test_limits_counts_and_order_hold_after_any_sequence(actions, max_states, limit, interval):
    pool = [tensor(1 + i) for i in range(6)]
    limit = None if limit is None else limit * KB
    expected: dict[str, Counter] = {}
    number, keys = 0, []
    store = Store(max_states, limit, interval)
    for action, *args in actions:
        if action in ("add", "own"):
            probe, what = args
            held = [pool[i][at:] for i, at in what] if action == "add" else [tensor(what)]
            told = expected.setdefault(probe, Counter())
            told["captured"] += 1
            number += 1
            keys.append(store.add(probe, CapturedState("m", step=number, output=held)))
        elif action == "amend":
            if keys:
                store.add_gradient(keys[args[0] % len(keys)], pool[args[1]])
        elif action == "clear":
            for probe in [args[0]] if args[0] else list(expected):
                if probe in expected:
                    counts = store.counts(probe)
                    expected[probe]["cleared"] += counts.kept
            store.clear(args[0])
        else:
            store.forget(args[0])
            expected.pop(args[0], None)

        assert store.nbytes == exact(store)
        assert limit is None or store.nbytes <= limit
        assert max_states is None or store.counts().kept <= max_states + interval - 1
        for probe, told in expected.items():
            counts = store.counts(probe)
            assert counts.captured == told["captured"]
            assert counts.cleared == told["cleared"]
            assert counts.captured == sum(counts) - counts.captured
            kept = steps(store, probe)
            assert kept == sorted(set(kept))
            assert len(kept) == counts.kept
    store.clear()
    assert store.nbytes == 0
