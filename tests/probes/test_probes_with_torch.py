"""Probes see modules also where PyTorch compiles, recomputes, fuses or copies them."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import threading

import pytest
import torch
from loops import hooks_on
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hookline.probes import Capture, HookManager
from hookline.probes.capture import probe
from hookline.probes.probe import Probe


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Two blocks, the second of which is passed twice; each pass may be checkpointed."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        for block in (self.blocks[0], self.blocks[1], self.blocks[1]):
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def x(rows=3, seed=1):
    data = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return data.requires_grad_()


def flow(net, which="**", backwards=1, **options):
    """Return name, call, output and gradient of each call in a forward and backward."""
    capture = Capture(which, gradient=True, **options)
    capture.attach(net)
    torch.manual_seed(7)
    loss = net(x()).pow(2).sum()
    for i in range(backwards):
        loss.backward(torch.tensor(1.0 + i), retain_graph=i + 1 < backwards)
    capture.detach()
    return [(s.module, s.call, s.output, s.gradient) for s in capture.states()]


def assert_same_flow(got, expected):
    assert [one[:2] for one in got] == [one[:2] for one in expected]
    for (name, call, output, gradient), (*_, right, right_gradient) in zip(
        got, expected, strict=True
    ):
        assert torch.equal(output, right), (name, call)
        assert gradient is not None, (name, call)
        torch.testing.assert_close(gradient, right_gradient)


# -- activation checkpointing


def test_under_checkpointing_each_call_is_captured_once_with_its_gradient():
    assert_same_flow(flow(Net(reentrant=False)), flow(Net()))


def test_in_reentrant_checkpointing_each_call_is_captured_once_without_a_gradient():
    seen, expected = flow(Net(reentrant=True)), flow(Net())
    assert [one[:2] for one in seen] == [one[:2] for one in expected]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(seen, expected, strict=True))
    assert {one[0] for one in seen if one[3] is not None} == {"head", ""}


def test_a_checkpointed_model_trains_the_same_with_probes_on():
    def trained(which):
        net = Net(reentrant=True)
        if which:
            Capture(which, gradient=True).attach(net)
        torch.manual_seed(3)
        net(x()).sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    with_probes = trained("**")
    assert all(map(torch.equal, trained(None), with_probes))


# -- torch.compile


def recompiled():
    return counters["stats"]["unique_graphs"], sum(counters["recompiles"].values())


@pytest.mark.slow
def test_attached_before_compiling_it_sees_a_full_graph_and_toggles_without_recompiling(caplog):
    torch.compiler.reset()
    net = Net().eval()
    capture = Capture(["blocks.*", "head"])
    attachment = capture.attach(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    given = x()
    plain = copy.deepcopy(net)
    out = compiled(given)
    assert torch.equal(out, plain(given))
    assert [(s.module, s.call) for s in capture.states()] == [
        *(("blocks.0", 0), ("blocks.1", 0), ("blocks.1", 1), ("head", 0)),
    ]
    assert torch.equal(capture["blocks.0"].output, plain.blocks[0](given))
    assert torch.equal(capture["blocks.0"].input[0], given)
    assert torch.equal(capture["head"].output, out)
    graphs = recompiled()
    for on, states in ((False, 4), (True, 8), (False, 8), (True, 12)):
        if on:
            attachment.enable()
        else:
            attachment.disable()
        compiled(given)
        assert capture.counts.captured == states
    assert recompiled() == graphs
    assert [one for one in caplog.records if one.name == "hookline"] == []


@pytest.mark.slow
def test_with_inductor_what_was_captured_is_not_overwritten_and_training_is_the_same():
    torch.compiler.reset()

    def run(which, compiled=True):
        """Return the states of three training steps and three forwards, and the weights."""
        net = Net().eval()
        capture = Capture(which or "head")
        if which:
            capture.attach(net)
        call = torch.compile(net, fullgraph=True) if compiled else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(3):
            optimizer.zero_grad()
            call(x(seed=i)).pow(2).sum().backward()
            optimizer.step()
        with torch.no_grad():  # here buffers are used again
            for i in range(3):
                call(x(seed=i))
        return capture.states(), [parameter.detach() for parameter in net.parameters()]

    states, weights = run("blocks.**")
    assert all(map(torch.equal, weights, run(None)[1]))
    expected, _ = run("blocks.**", compiled=False)
    silent = {state.module for state in expected} - {state.module for state in states}
    assert not silent
    assert len(states) == len(expected)
    for got, right in zip(states, expected, strict=True):
        assert (got.module, got.call) == (right.module, right.call)
        torch.testing.assert_close(got.output, right.output)


@pytest.mark.slow
def test_attached_after_compiling_it_says_so(caplog):
    torch.compiler.reset()
    compiled = torch.compile(Net().eval(), backend="aot_eager")
    compiled(x())
    with caplog.at_level(logging.WARNING, "hookline"), probe(compiled, "blocks.*") as seen:
        compiled(x())
    assert len(seen) == 0
    assert "saw no call of 'blocks.0', 'blocks.1'" in caplog.text
    assert "compiled" in caplog.text
    assert "attach first, then compile" in caplog.text


@pytest.mark.slow
def test_gradients_in_a_compiled_model_are_not_there_and_it_says_so(caplog):
    torch.compiler.reset()
    net = Net().eval()
    capture = Capture("head", gradient=True)
    capture.attach(net)
    with caplog.at_level(logging.WARNING, "hookline"):
        for _ in range(2):
            torch.compile(net, backend="aot_eager")(x()).sum().backward()
    assert [state.gradient for state in capture.states()] == [None, None]
    assert caplog.text.count("cannot see gradients in a compiled model") == 1


# -- names


# -- modules that are gone around


def test_a_module_whose_forward_is_called_directly_is_named(caplog):
    class Direct(Net):
        def forward(self, x):
            return self.head.forward(self.blocks[0](x))

    net = Direct()
    with caplog.at_level(logging.WARNING, "hookline"), probe(net, ["head", "blocks.0"]) as seen:
        net(x())
        net(x())
    assert list(seen) == ["blocks.0"]
    assert caplog.text.count("saw no call of 'head'") == 1
    assert "`.forward()` or another method was called directly" in caplog.text


# -- modes


# -- copies of the model


def test_copies_and_pickles_of_a_model_have_no_probe_and_work():
    net = Net().eval()
    with probe(net, "**", input=True) as seen, HookManager() as manager:
        manager.register_capture_hook(net.head, "head")
        out = net(x())
        states = len(seen.states())
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        copies = (
            copy.deepcopy(net),
            pickle.loads(pickle.dumps(net)),
            torch.load(file, weights_only=False),
        )
        for other in copies:
            assert torch.equal(other(x()), out)
        assert len(seen.states()) == states
        assert len(manager.get_captured_states("head")) == 1
        net(x())
        assert len(seen.states()) == 2 * states
        with probe(copies[0], "head") as another:
            copies[0](x())
        assert list(another) == ["head"]
    assert hooks_on(net) == 0


# -- threads


def test_threads_with_forward_and_backward_get_their_own_gradients():
    net = Net().eval()
    capture = Capture("head", gradient=True)
    capture.attach(net)
    threads, rounds = 4, 25

    def work(number):
        for i in range(rounds):
            scale = float(1 + number * rounds + i)
            torch.autograd.grad((net(x(seed=int(scale))) * scale).sum(), list(net.parameters()))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    capture.detach()
    states = capture.states()
    assert len(states) == threads * rounds
    by_scale = {int(state.gradient[0, 0]): state for state in states}
    assert sorted(by_scale) == list(range(1, threads * rounds + 1))
    with torch.no_grad():
        for scale, state in by_scale.items():
            torch.testing.assert_close(state.output, net(x(seed=scale)))


# -- leaks


def resident():
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.parametrize("times", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_thousands_of_rounds_of_attaching_and_detaching_leave_nothing_behind(times):
    net = Net().eval()
    given = torch.randn(1, 4)
    capture, manager = Capture("head", input=False, kwargs=False), HookManager()

    def rounds(times):
        for i in range(times):
            capture.attach(net)
            manager.register_capture_hook(net.head, "head")
            if i % 50 == 0:
                with torch.no_grad():
                    net(given)
            manager.remove_hook("head")
            capture.detach()
            capture.clear()

    rounds(500)
    gc.collect()
    objects, memory = len(gc.get_objects()), resident()
    rounds(times)
    gc.collect()
    assert hooks_on(net) == 0
    assert len(gc.get_objects()) - objects < 100
    assert resident() - memory < 8 * 2**20
    assert (manager.nbytes, capture.store.nbytes) == (0, 0)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.layer(x)).sum() + self.relu(self.layer(-x)).sum()


def test_in_a_compiled_model_inputs_are_as_they_were_before_the_module_ran() -> None:
    model, x = InPlace(), torch.randn(3, 2)
    with probe(model, ["layer", "relu"], input=True, kwargs=True) as seen:
        torch.compile(model, fullgraph=True)(x)
    assert len(seen["relu"]) == len(seen["layer"]) == 2
    for relu, layer in zip(seen["relu"], seen["layer"], strict=True):
        assert torch.equal(relu.input[0], layer.output)
        assert torch.equal(relu.output, layer.output.relu())
    assert torch.equal(seen["layer"][0].input[0], x)
    assert not torch.equal(seen["relu"].input[0], seen["relu"].output)


# -- the start and the end of a call belong together


class Pairs(Probe):
    """Saves the arguments at the start of each call and compares them at its end."""

    wants_before = True

    def __init__(self, modules):
        super().__init__(modules)
        self.started: list[str] = []
        self.ended: list[str] = []

    def before(self, call):
        assert call.saved is None
        call.saved = call.args
        self.started.append(call.name)

    def after(self, call):
        assert call.saved is call.args
        self.ended.append(call.name)


def test_a_call_that_raises_has_no_end_and_leaves_nothing_behind():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    pairs = Pairs("**")
    attachment = pairs.attach(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    assert (pairs.started, pairs.ended) == (["", "0", "1"], ["0"])
    assert attachment.local.state.calls == []
    try:
        raise ValueError
    except ValueError:  # a forward that runs while an error is handled has not failed
        model(torch.ones(2))
    assert pairs.ended == ["0", "0", "1", ""]


def test_an_interrupted_forward_is_forgotten_when_the_next_one_starts():
    class Interrupted(nn.Module):
        error: BaseException | None = KeyboardInterrupt()

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return x

    model = nn.Sequential(nn.Sequential(Interrupted()))
    pairs = Pairs("**")
    attachment = pairs.attach(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2))
    assert pairs.ended == []  # PyTorch does not call hooks then
    model[0][0].error = None
    pairs.started.clear()
    model(torch.ones(2))
    assert (pairs.started, pairs.ended) == (["", "0", "0.0"], ["0.0", "0", ""])
    assert attachment.local.state.calls == []


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputation_that_stops_early_leaves_no_calls_behind(early_stop):
    class Edits(Pairs):  # so that it sees recomputations
        edits = enable_intervention = True

    net = Net(reentrant=False)
    pairs = Edits("blocks.**")
    attachment = pairs.attach(net)
    with set_checkpoint_early_stop(early_stop):
        loss = net(x()).sum()
        assert len(pairs.started) == len(pairs.ended) == 12
        loss.backward()
    assert len(pairs.started) == 24
    assert (len(pairs.ended) < 24) == early_stop  # stopped within `down`, or after it
    assert attachment.local.state.calls == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_pairs_in_a_compiled_model_nest_as_the_modules_do(backend):
    torch.compiler.reset()
    net = Net().eval()
    pairs = Pairs("blocks.**")
    attachment = pairs.attach(net)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    compiled(x())
    assert len(pairs.started) == len(pairs.ended) == 12
    assert pairs.ended[:4] == ["blocks.0.up", "blocks.0.drop", "blocks.0.down", "blocks.0"]
    assert attachment.local.state.calls == []
