"""Values of event arguments: lazy numbers, metrics, state, the step."""

import copy
import dataclasses
import json
import math
import operator
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline import LazyFloat, Metrics, NotProvidedError, StepContext
from hookline.context import State


class Number:
    """Counts how often it was converted to a float."""

    def __init__(self, value=0.5):
        self.value = value
        self.reads = 0

    def __float__(self):
        self.reads += 1
        return self.value


class CountingTensor(torch.Tensor):
    """A tensor that counts how often its value was read."""

    reads = 0

    def item(self):
        type(self).reads += 1
        return super().item()

    def __float__(self):
        type(self).reads += 1
        return super().__float__()


@pytest.fixture
def tensor():
    CountingTensor.reads = 0
    return torch.tensor(0.5).as_subclass(CountingTensor)


def same(one, other):
    """Return whether both are equal, or NaN, and of the same type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    both_nan = isinstance(one, float) and math.isnan(one) and math.isnan(other)
    return both_nan or one == other


def outcome(function, *arguments):
    """Return the result of a call, or the type of its exception."""
    try:
        return function(*arguments)
    except (ArithmeticError, ValueError, TypeError) as error:
        return type(error)


# -- LazyFloat: when it is read --------------------------------------------------------------------


def test_a_lazy_number_is_not_read_before_it_is_used():
    number = Number()
    lazy = LazyFloat(number)
    assert isinstance(lazy, LazyFloat)
    assert [lazy, {"loss": lazy}]
    assert number.reads == 0
    assert float(lazy) == 0.5
    assert number.reads == 1


def test_a_lazy_tensor_is_read_once_and_then_released(tensor):
    lazy = LazyFloat(tensor)
    assert CountingTensor.reads == 0
    assert [lazy * 2, lazy * 3] == [1.0, 1.5]
    assert CountingTensor.reads == 1


# -- LazyFloat: it behaves like a float ------------------------------------------------------------

floats = st.floats() | st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf])
BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.floordiv, operator.mod, divmod, math.copysign),
]
COMPARE = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
UNARY = [
    *(operator.neg, operator.pos, abs, float, int, bool, round, complex, repr, str),
    *(math.trunc, math.floor, math.ceil, math.isnan, math.exp, math.sqrt),
    lambda x: round(x, 2),
    lambda x: f"{x}",
    lambda x: f"{x:.3e}",
    lambda x: f"{x:>12.2f}",
    lambda x: f"{x:%}",
    lambda x: "%.4f" % x,  # noqa: UP031 — the spelling is what is tested
    lambda x: "{:g}".format(x),  # noqa: UP032
    lambda x: "%d" % x,  # noqa: UP031
    lambda x: sum([x, x]),
]


@given(floats, floats, st.sampled_from(BINARY + COMPARE))
def test_a_lazy_number_computes_and_compares_like_its_float(a, b, function):
    expected = outcome(function, a, b)
    assert same(outcome(function, LazyFloat(Number(a)), b), expected)
    assert same(outcome(function, a, LazyFloat(Number(b))), expected)
    assert same(outcome(function, LazyFloat(Number(a)), LazyFloat(Number(b))), expected)


@given(floats, st.sampled_from(UNARY))
def test_a_lazy_number_converts_and_formats_like_its_float(a, function):
    assert same(outcome(function, LazyFloat(Number(a))), outcome(function, a))


@given(st.floats(allow_nan=False))
def test_a_lazy_number_is_found_where_its_float_is(a):
    assert hash(LazyFloat(a)) == hash(a)
    assert LazyFloat(a) in {a}
    assert a in {LazyFloat(a): "found"}


@given(floats)
def test_a_lazy_number_pickles_and_copies_to_a_float(a):
    lazy = LazyFloat(Number(a))
    for again in (pickle.loads(pickle.dumps(lazy)), copy.copy(lazy), copy.deepcopy(lazy)):
        assert same(again, a)


@pytest.mark.parametrize(
    "name", [name for name in dir(float) if not name.startswith("_") and name != "fromhex"]
)
def test_a_lazy_number_has_what_a_float_has(name):
    expected, got = getattr(0.5, name), getattr(LazyFloat(0.5), name)
    assert same(got() if callable(got) else got, expected() if callable(expected) else expected)


def test_a_lazy_number_is_not_equal_to_something_else():
    assert LazyFloat(1.0) != "1.0"
    assert (LazyFloat(1.0) == None) is False  # noqa: E711
    with pytest.raises(TypeError):
        LazyFloat(1.0) < "1.0"  # noqa: B015
    with pytest.raises(TypeError):
        LazyFloat(1.0) + "1.0"


def test_numpy_takes_a_lazy_number_as_a_float():
    lazy = LazyFloat(1.5)
    assert np.asarray(lazy).dtype == np.float64
    assert np.array([lazy, 2.5]).tolist() == [1.5, 2.5]
    assert np.mean([lazy, lazy]) == 1.5
    assert np.float32(lazy) == 1.5
    assert np.asarray(lazy, dtype=np.float32).dtype == np.float32
    assert (np.array([1.0, 2.0]) * lazy).tolist() == [1.5, 3.0]
    assert (lazy * np.array([1.0, 2.0])).tolist() == [1.5, 3.0]


@pytest.mark.parametrize("function", COMPARE)
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_lazy_number_compares_with_an_array_element_by_element(function, make):
    values = make([1.0, 1.5, 2.0])
    assert function(LazyFloat(1.5), values).tolist() == function(1.5, values).tolist()
    assert function(values, LazyFloat(1.5)).tolist() == function(values, 1.5).tolist()


# -- Metrics ---------------------------------------------------------------------------------------


@pytest.fixture
def number():
    return Number()


@pytest.fixture
def metrics(number):
    return Metrics({"loss": LazyFloat(number), "accuracy": torch.tensor(0.75), "n": 3})


PLAIN = {"loss": 0.5, "accuracy": 0.75, "n": 3}


def plain(mapping):
    """Return whether all values are Python numbers."""
    return all(type(value) in (float, int) for value in dict.values(mapping))


def test_keys_membership_and_length_read_nothing(metrics, number):
    assert list(metrics) == list(metrics.keys()) == ["loss", "accuracy", "n"]
    assert "loss" in metrics
    assert "other" not in metrics
    assert len(metrics) == 3
    assert bool(metrics)
    assert list(reversed(metrics)) == ["n", "accuracy", "loss"]
    assert number.reads == 0


def test_setting_a_value_reads_nothing(number):
    metrics = Metrics()
    metrics["loss"] = LazyFloat(number)
    metrics.update(again=LazyFloat(number))
    metrics.update({"more": LazyFloat(number)})
    metrics |= {"most": LazyFloat(number)}
    del metrics["again"]
    assert number.reads == 0
    assert metrics["most"] == 0.5


def updated(mapping):
    target = {}
    target.update(mapping)
    return target


READINGS = {
    "indexing": lambda m: {key: m[key] for key in m},
    "get": lambda m: {key: m.get(key) for key in m},
    "items": lambda m: {key: value for key, value in m.items()},  # noqa: C416
    "values": lambda m: dict(zip(m.keys(), m.values(), strict=True)),
    "dict": dict,
    "unpacking": lambda m: {**m},
    "copy": lambda m: m.copy(),
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "or": lambda m: m | {},
    "or from the right": lambda m: {} | m,
    "update": updated,
    "json": lambda m: json.loads(json.dumps(m)),
    "json inside": lambda m: json.loads(json.dumps({"metrics": m}))["metrics"],
    "pop": lambda m: {key: m.pop(key) for key in list(m)},
    "popitem": lambda m: dict(reversed([m.popitem() for _ in range(len(m))])),
    "setdefault": lambda m: {key: m.setdefault(key, 0) for key in list(m)},
}


@pytest.mark.parametrize("how", READINGS)
def test_all_access_to_metrics_gives_plain_numbers_read_once(how, metrics, number):
    seen = READINGS[how](metrics)
    assert plain(seen)
    assert dict(seen) == PLAIN
    assert metrics.get("loss", 0.5) == 0.5
    assert number.reads == 1


def test_metrics_are_formatted_with_plain_numbers(metrics):
    assert str(metrics) == repr(metrics) == str(PLAIN)
    assert "{loss:.2f}".format(**metrics) == "0.50"
    assert "{loss:.2f}".format_map(metrics) == "0.50"
    assert "%(loss).2f" % metrics == "0.50"  # noqa: UP031


def test_metrics_are_equal_to_a_dictionary_of_their_numbers(metrics):
    assert metrics == PLAIN
    assert PLAIN == metrics  # noqa: SIM300
    assert metrics == Metrics(PLAIN)
    assert metrics != {**PLAIN, "n": 4}
    assert metrics != 3


def test_metrics_can_be_changed_like_a_dictionary(metrics):
    metrics["extra"] = 1.0
    metrics |= {"n": 4}
    assert metrics | {"loss": 9.0} == {**PLAIN, "n": 4, "extra": 1.0, "loss": 9.0}
    assert {"loss": 9.0, "new": 1} | metrics == {**PLAIN, "n": 4, "extra": 1.0, "new": 1}
    assert metrics.pop("nothing", "default") == "default"
    with pytest.raises(KeyError):
        metrics.pop("nothing")
    assert metrics.setdefault("fresh", torch.tensor(2.0)) == 2.0
    assert metrics.get("nothing") is None
    assert metrics.get("nothing", 3) == 3


def test_copies_and_pickles_of_metrics_are_metrics(metrics):
    metrics["val/loss"] = 1.0
    for again in (copy.copy(metrics), copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics))):
        assert type(again) is Metrics
        assert again["eval/loss"] == 1.0


# -- eval/ is another name for val/ ----------------------------------------------------------------


def test_eval_is_another_name_for_val(number):
    metrics = Metrics({"val/loss": LazyFloat(number), "val/f1": 0.9})
    assert "eval/f1" in metrics
    assert "eval/loss" in metrics
    assert number.reads == 0
    assert metrics["eval/f1"] == metrics.get("eval/f1") == 0.9
    assert same(metrics["eval/loss"], 0.5)
    assert list(metrics) == ["val/loss", "val/f1"]


def test_perplexity_is_derived_from_the_loss(number):
    metrics = Metrics({"val/loss": LazyFloat(number)})
    assert "eval/perplexity" in metrics
    assert number.reads == 0
    assert metrics["eval/perplexity"] == metrics.get("eval/perplexity") == math.exp(0.5)


# -- State -----------------------------------------------------------------------------------------


def test_state_has_the_values_that_the_loop_provides(number):
    state = State({"latest_loss": LazyFloat(number), "status": "training"})
    assert state["status"] == "training"
    assert number.reads == 0
    assert same(state["latest_loss"], 0.5)
    assert json.loads(json.dumps(state)) == {"latest_loss": 0.5, "status": "training"}


def test_the_error_for_a_key_that_the_loop_does_not_provide_says_what_to_call():
    state = State({"status": "training"}, {"avg_loss": "Call session.backward(loss)."})
    assert "avg_loss" not in state
    assert state.get("avg_loss") is None
    assert state.get("avg_loss", 3.0) == 3.0
    assert list(state) == ["status"]
    with pytest.raises(NotProvidedError, match=r"state\['avg_loss'\].*session\.backward\(loss\)"):
        state["avg_loss"]


def test_a_pickled_or_copied_state_has_the_same_error_for_absent_keys():
    state = State({"status": "training"}, {"avg_loss": "Call session.backward(loss)."})
    for again in (pickle.loads(pickle.dumps(state)), copy.copy(state), copy.deepcopy(state)):
        assert again == {"status": "training"}
        with pytest.raises(NotProvidedError, match=r"session\.backward"):
            again["avg_loss"]


# -- StepContext -----------------------------------------------------------------------------------


SEVEN = ["step", "loss", "grad_norm", "lr", "tokens_seen", "model", "optimizer"]


def context(**changes):
    values = dict(zip(SEVEN, (3, 0.5, 2.0, 0.1, 96, None, None), strict=True))
    return StepContext(**{**values, **changes})


def test_step_contexts_compare_by_their_fields():
    assert context() == context()
    assert context() == context(loss=LazyFloat(0.5), grad_norm=torch.tensor(2.0))
    assert context() != context(loss=0.25)
    assert context() != context(skipped=True)


def test_a_step_context_prints_its_numbers():
    assert repr(context(loss=torch.tensor(0.5))) == (
        "StepContext(step=3, loss=0.5, grad_norm=2.0, lr=0.1, tokens_seen=96, model=None, "
        "optimizer=None, skipped=False)"
    )


def test_a_field_can_be_replaced_and_set():
    ctx = dataclasses.replace(context(), step=4, loss=0.25)
    assert (ctx.step, ctx.loss, ctx.lr) == (4, 0.25, 0.1)
    ctx.loss = torch.tensor(0.75)
    assert same(ctx.loss, 0.75)


def test_a_step_context_reads_nothing_before_a_field_is_accessed(tensor):
    ctx = context(loss=tensor, grad_norm=tensor)
    assert ctx.step == 3
    assert CountingTensor.reads == 0
    assert same(ctx.loss, 0.5)
    assert ctx.loss + ctx.loss == 1.0
    assert CountingTensor.reads == 1  # once, and the norm is not read


@pytest.mark.parametrize("field", ["loss", "grad_norm", "lr"])
def test_a_field_given_as_a_tensor_is_a_float(field):
    assert same(getattr(context(**{field: torch.tensor(0.25)}), field), 0.25)
    assert same(getattr(context(**{field: LazyFloat(Number(0.25))}), field), 0.25)


def test_two_lazy_numbers_are_read_in_one_transfer():
    loss, norm = LazyFloat(torch.tensor(1.5)), LazyFloat(torch.tensor([2.5]))
    loss.read_with(norm)
    assert float(norm) == 2.5
    assert type(loss._value) is float
    assert float(loss) == 1.5
    other = LazyFloat(torch.tensor(1.0, dtype=torch.float64))
    other.read_with(norm)  # of another kind: each for itself
    assert float(other) == 1.0
