"""Capture: what flows through modules, as it was when it flowed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from loops import batches, config, make, same, weights
from torch import nn

import hookline
from hookline import Trainer
from hookline.errors import ConfigError
from hookline.probes import CapturedState, Counts, Store
from hookline.probes.capture import Capture, probe
from hookline.probes.taps import tap


def model(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))))


def x(*shape, seed=3):
    return torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(seed))


def captured(net, which="*", given=None, **options):
    """Capture one forward."""
    capture = Capture(which, **options)
    capture.attach(net)
    net(x() if given is None else given)
    capture.detach()
    return capture


class Keywords(nn.Module):
    def forward(self, a, *, scale):
        return a * scale


class UsesKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Keywords()

    def forward(self, a):
        return self.inner(a, scale=torch.tensor(2.0))


# -- what is kept


def test_inputs_outputs_and_where_they_were():
    net = model()
    seen = captured(net)
    assert list(seen) == ["0", "1", "2"]
    assert torch.equal(seen["0"].input[0], x())
    assert torch.equal(seen["0"].output, net[0](x()))
    assert torch.equal(seen["2"].input[0], seen["1"].output)
    [state] = seen["2"]
    assert isinstance(state, CapturedState)
    assert (state.module, state.probe, state.step, state.epoch) == ("2", "capture", None, None)
    assert (state.call, state.layer_idx) == (0, 2)
    assert state.time == pytest.approx(seen["0"][0].time, abs=5)
    assert not state.output.requires_grad
    assert state.gradient is None


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Data:
    hidden: Any
    extra: Any = None


class Nested(nn.Module):
    def forward(self, a):
        return {"pair": Pair(a + 1, [a + 2, "text"]), "data": Data(a + 3, extra=(a + 4, 5))}


def test_tensors_anywhere_in_what_a_module_returns():
    [state] = captured(nn.Sequential(Nested()), "0").states()
    out = state.output
    assert torch.equal(out["pair"].first, x() + 1)
    assert torch.equal(out["pair"].second[0], x() + 2)
    assert out["pair"].second[1] == "text"
    assert torch.equal(out["data"].hidden, x() + 3)
    assert torch.equal(out["data"].extra[0], x() + 4)
    assert out["data"].extra[1] == 5


class Layer:
    def __init__(self):
        self.keys = self.values = None


class Cache:
    """As in Hugging Face's transformers: each module adds to it."""

    def __init__(self, layers):
        self.layers = [Layer() for _ in range(layers)]


class Attention(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.key, self.value = number, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a, cache):
        layer = cache.layers[self.number]
        layer.keys, layer.values = self.key(a), self.value(a)
        return a + layer.keys * layer.values, cache


class CachingModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(i) for i in range(3))

    def forward(self, a):
        cache = Cache(3)
        for block in self.blocks:
            a, cache = block(a, cache)
        return a, cache


def test_tensors_in_objects_are_copied_without_their_graph_and_counted():
    net, capture = CachingModel(), Capture("blocks.1")
    capture.attach(net)
    _, cache = net(x())
    [state] = capture.states()
    before, after = state.input[1], state.output[1]
    assert type(before) is type(after) is Cache
    assert [layer.keys is not None for layer in before.layers] == [True, False, False]
    assert [layer.keys is not None for layer in after.layers] == [True, True, False]
    assert torch.equal(after.layers[1].keys, cache.layers[1].keys)
    assert cache.layers[1].keys.requires_grad
    assert not any(t.requires_grad for t in state.tensors())
    # The input and one layer came in, the output and two layers went out.
    assert capture.store.nbytes == state.nbytes == 8 * x().nbytes


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, a):
        return self.layer(self.layer(a))


def test_a_module_that_is_called_twice_gives_two_states():
    net = Twice()
    seen = captured(net, "layer")
    first, second = seen["layer"]
    assert (first.call, second.call) == (0, 1)
    assert torch.equal(second.input[0], first.output)
    assert torch.equal(seen["layer"].output, second.output)  # the last
    assert seen["layer"][0] is first
    assert seen["layer"][-1:] == [second]
    assert len(seen["layer"]) == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_keyword_arguments_that_another_hook_has_replaced(in_place):
    def replace(module, args, kwargs):
        if in_place:
            kwargs["scale"] = torch.tensor(5.0)
            return None
        return args, {**kwargs, "scale": torch.tensor(5.0)}

    net, capture = UsesKeywords(), Capture("inner")
    capture.attach(net)
    net.inner.register_forward_pre_hook(replace, with_kwargs=True)
    out = net(x())
    assert torch.equal(out, x() * 5)
    assert capture["inner"].kwargs == {"scale": torch.tensor(5.0)}
    capture.detach()


# -- how it is kept


def test_what_an_in_place_module_got_is_what_was_there_before_it_ran():
    net = model(nn.Linear(4, 4), nn.ReLU(inplace=True))
    seen = captured(net, "1")["1"]
    assert torch.equal(seen.input[0], net[0](x()))
    assert torch.equal(seen.output, net(x()))
    assert not torch.equal(seen.input[0], seen.output)


def test_another_dtype_for_floating_point_only():
    net = nn.Sequential(nn.Embedding(5, 4))
    seen = captured(net, "0", torch.tensor([1, 2]), dtype="float16")["0"]
    assert (seen.input[0].dtype, seen.output.dtype) == (torch.int64, torch.float16)
    assert captured(net, "0", torch.tensor([1]), dtype=torch.float64)["0"].output.dtype is (
        torch.float64
    )
    with pytest.raises(ConfigError, match=r"no dtype 'flaot16'. Did you mean 'float16'"):
        Capture("*", dtype="flaot16")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_in_place_operation_after_the_module_does_not_reach_a_copy(device):
    net = model(nn.Linear(4, 4), nn.ReLU(inplace=True))
    assert torch.equal(captured(net, "0", device=device)["0"].output, net[0](x()))


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (0, lambda t: t[0]),
        (slice(2), lambda t: t[:2]),
        ((..., -1), lambda t: t[..., -1]),
        ("[:, -1]", lambda t: t[:, -1]),
        ("..., 1:3", lambda t: t[..., 1:3]),
        ("::2", lambda t: t[::2]),
        (lambda t: t.T[1], lambda t: t.T[1]),
    ],
)
def test_a_part_of_each_tensor(select, expected):
    net = model()
    got = captured(net, "0", select=select)["0"].output
    assert torch.equal(got, expected(net[0](x())))
    assert got.untyped_storage().nbytes() == got.numel() * 4  # the rest is not kept alive


def test_every_n_forwards_all_calls_of_it_together():
    net = Twice()
    for options in ({}, {"input": False, "kwargs": False}):  # with a look before the module, or not
        capture = Capture("layer", **options)
        capture.attach(net, every=3)
        for i in range(1, 8):
            net(x(seed=i))
        capture.detach()
        assert [state.call for state in capture.states()] == [0, 1] * 2
        firsts = [state.output for state in capture.states() if state.call == 0]
        assert same(firsts, [net.layer(x(seed=i)).detach() for i in (3, 6)])


# -- gradients


def test_the_gradient_of_the_output():
    net = model()
    seen = captured(net, gradient=True)
    assert seen["1"].gradient is None  # not yet
    capture = Capture("*", gradient=True)
    capture.attach(net)
    out = net(x())
    capture.detach()
    (2 * out).sum().backward()  # also after the probe was taken off
    assert torch.equal(capture["2"].gradient, torch.full((3, 2), 2.0))
    assert torch.allclose(capture["1"].gradient, torch.full((3, 2), 2.0) @ net[2].weight)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize("earlier", [0, 3])
def test_the_gradient_of_what_was_used_before_it_is_changed_in_place_has_both_parts(shape, earlier):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, a, inplace):
            h = self.inner(a)
            z = earlier * (h + 1) if earlier else 0
            h = h.relu_() if inplace else h.relu()
            return self.outer(h) + z

    net = Both()
    capture = Capture("inner", gradient=True)
    capture.attach(net)
    for inplace in (True, False):
        net(x(*shape), inplace).sum().backward()
    capture.detach()
    changed, expected = (state.gradient for state in capture.states())
    assert torch.allclose(changed, expected)


class TwoHeads(nn.Module):
    def forward(self, a):
        return {"used": a * 2, "unused": a * 3, "number": 1, "leaf": torch.ones(2)}


def test_gradients_stand_where_the_outputs_stand():
    net = nn.Sequential(nn.Linear(4, 4), TwoHeads())
    capture = Capture("1", gradient=True)
    capture.attach(net)
    out = net(x())
    out["used"].sum().backward()
    [state] = capture.states()
    assert torch.equal(state.gradient["used"], torch.ones(3, 4))
    assert state.gradient["unused"] is None
    assert state.gradient["leaf"] is None
    assert state.gradient["number"] == 1


def test_without_gradients_there_is_none():
    net = model()
    capture = Capture("*", gradient=True)
    capture.attach(net)
    with torch.no_grad():
        net(x())
    net.requires_grad_(False)
    net(x())
    assert [state.gradient for state in capture.states()] == [None] * 6
    assert capture["0"].output is not None


# -- limits


def dropped_messages(caplog):
    return [r.getMessage() for r in caplog.records if "captured states" in r.getMessage()]


def test_states_that_do_not_fit_into_memory_are_reported_once_with_their_number(caplog):
    net = nn.Sequential(nn.Linear(256, 256))
    with hookline.probe(net, "0", memory_limit_mb=1) as results:
        for _ in range(20):
            net(torch.randn(256, 256))
    (said,) = dropped_messages(caplog)
    assert "The probe 'probe' drops captured states that do not fit" in said
    assert "because of memory_limit_mb=1." in said
    assert results.counts.dropped == 16
    assert "16 of 20 states were dropped" in repr(results)
    results.states()
    assert len(dropped_messages(caplog)) == 1


class Fails(nn.Module):
    def forward(self, a):
        if a.sum() > 0:
            raise ValueError
        return a


def test_what_a_failed_call_has_left_is_freed_by_the_next_one_and_by_clear():
    net, capture = nn.Sequential(Fails()), Capture("0")
    capture.attach(net)
    for call in (net, net[0]):  # within the model's call, or alone
        for free in (lambda: call(torch.zeros(1)), capture.clear):  # noqa: B023
            alive = []
            for _ in range(3):
                given = torch.ones(4)
                alive.append(weakref.ref(given))
                with pytest.raises(ValueError):  # noqa: PT011 - it has no message
                    call(given)
                del given
            gc.collect()
            assert sum(one() is not None for one in alive) <= 1
            free()
            gc.collect()
            assert not any(one() is not None for one in alive)


# -- asking for it


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"Unknown option 'outputs'. Did you mean 'output'"):
        Capture("*", outputs=True)
    with pytest.raises(ValueError, match=r"memory_limit_mb is inf; expected a finite number"):
        Capture("*", memory_limit_mb=float("inf"))
    for options in ({"which": "h"}, {"taps": "h"}):
        with pytest.raises(ConfigError, match=r"of a torch\.nn\.Module, not of a function"):
            probe(lambda a: a, **options)
    with pytest.raises(ConfigError, match="No module matches 'zero'"):
        captured(model(), "zero")
    with pytest.raises(ConfigError, match="neither modules nor taps"):
        captured(model(), None)


def test_copies_and_pickles_have_the_options_and_no_states():
    net, store = model(), Store()
    for capture in (captured(net, select=0), captured(net, store=store, select=0)):
        for other in (copy.deepcopy(capture), pickle.loads(pickle.dumps(capture))):
            assert other.counts == Counts()
            other.attach(net)
            net(x())
            other.detach()
            assert other["0"].output.shape == (4,)


# -- in a trainer


def test_in_a_trainer_states_have_step_and_epoch_and_every_counts_steps():
    net, optimizer = make()
    capture = Capture("first", gradient=True)
    trainer = Trainer(config(max_epochs=2, accumulate=2), net, optimizer)
    trainer.add_hook(capture, every=2)
    trainer.fit(batches(6), val_loaders=batches(2))
    # The steps 2, 4 and 6: as everywhere, `step` counts the steps that are completed.
    assert [(s.step, s.epoch) for s in capture.states()] == [
        *((1, 0), (1, 0), (3, 1), (3, 1), (5, 1), (5, 1)),
    ]
    assert all(state.gradient is not None for state in capture.states())
    assert {state.probe for state in capture.states()} == {"capture"}


def test_training_is_bit_for_bit_the_same():
    plain, seen = make(), make()
    Trainer(config(seed=1), *plain).fit(batches(4))
    hooks = [Capture("**", gradient=True), Capture("*", select=lambda t: t.norm())]
    Trainer(config(seed=1), *seen, hooks=hooks).fit(batches(4))
    assert same(weights(plain[0]), weights(seen[0]))


# -- the short form


def test_the_short_form():
    net = model()
    with probe(net, "*") as seen:
        net(x())
    assert torch.equal(seen["0"].output, net[0](x()))
    assert list(seen) == ["0", "1", "2"]
    assert {name: calls.output.shape[0] for name, calls in seen.items()} == dict.fromkeys("012", 3)
    assert (len(seen), seen.get("nine"), "1" in seen) == (3, None, True)
    net(x())
    assert len(seen["0"]) == 1  # off the model
    assert not any(module._forward_hooks for module in net.modules())
    assert "'1': CapturedState('1', probe='probe'" in repr(seen)
    assert len(seen.states()) == 3
    assert seen.counts.captured == 3


def test_the_short_form_without_a_block_and_after_an_exception():
    net = model()
    seen = probe(net, "0")
    assert bool(seen)
    assert len(seen) == 0
    net(x())
    seen.disable()
    net(x())
    seen.enable()
    net(x())
    assert len(seen["0"]) == 2
    seen.clear()
    assert len(seen) == 0
    seen.close()
    seen.close()
    with pytest.raises(ZeroDivisionError), probe(net, "0"):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in net.modules())


def test_the_short_form_sees_taps():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a):
            scores = tap(self.layer(a), "attn.scores")
            return scores.softmax(-1)

    net = Net()
    with probe(net, taps="attn.*", gradient=True) as seen, probe(net, "layer", taps=["x"]) as both:
        net(x())[0, 0].backward()
    assert list(seen) == ["attn.scores"]
    assert torch.equal(seen["attn.scores"].output, net.layer(x()))
    assert seen["attn.scores"].gradient.shape == (3, 4)
    assert list(both) == ["layer"]
    with probe(net, taps="attn.scores", input=True) as seen:
        net(x())
    assert seen["attn.scores"][0].input is None
