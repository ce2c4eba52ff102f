"""`hookline.tap`: named values in a model's code."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookline.errors import ProbeError
from hookline.probes import taps as taps_module
from hookline.probes.call import Call
from hookline.probes.probe import Probe
from hookline.probes.taps import tap


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = tap(self.inner(x), f"block.{self.index}.scores")
        return x + torch.tanh(scores)


class Model(nn.Module):
    """Blocks with taps; `how` says how they are checkpointed."""

    def __init__(self, how: str = "plain", blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(i) for i in range(blocks))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return tap(x, "last")


class Seen(Probe):
    def __init__(self, *names: str, modules: Any = None) -> None:
        super().__init__(modules, taps=names)
        self.calls: list[Call] = []

    def after(self, call: Call) -> None:
        if call.compiled:  # its memory is used again
            call.output = call.output.clone()
        self.calls.append(call)

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]


class Double(Probe):
    edits = enable_intervention = True

    def __init__(self, *names: str, modules: Any = None) -> None:
        super().__init__(modules, taps=names)

    def after(self, call: Call) -> Any:
        return call.output * 2

    def compiled_edit(self, name: str) -> Any:
        return lambda output, on: torch.where(on, output * 2, output)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    gc.collect()  # what other tests have left
    yield
    assert taps_module._registered == ()
    assert not taps_module._enabled


def x_of(n: int = 3) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)


def test_a_probe_sees_named_values_by_name_and_by_glob() -> None:
    model = Model()
    by_name, by_glob, deep = Seen("block.1.scores"), Seen("block.*.scores"), Seen("**")
    for probe in (by_name, by_glob, deep):
        probe.attach(model)
    out = model(x_of())
    for probe in (by_name, by_glob, deep):
        probe.detach()
    model(x_of())
    assert by_name.names == ["block.1.scores"]
    assert by_glob.names == ["block.0.scores", "block.1.scores"]
    assert deep.names == ["block.0.scores", "block.1.scores", "last"]
    call = deep.calls[-1]
    assert call.output is out
    assert (call.module, call.args, call.kwargs, call.index) == (None, (), {}, 0)


def test_another_model_with_the_same_names_is_not_seen() -> None:
    model, other = Model(), Model()
    probe, others = Seen("last"), Seen("last")
    probe.attach(model)
    others.attach(other)
    mine = model(x_of())
    theirs = other(x_of() + 1)
    Model()(x_of())
    probe.detach()
    others.detach()
    assert [call.output is mine for call in probe.calls] == [True]
    assert [call.output is theirs for call in others.calls] == [True]


def test_a_model_that_fails_does_not_leave_its_taps_open() -> None:
    class Fails(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("no")

    model, probe = Fails(), Seen("last")
    probe.attach(model)
    with pytest.raises(ValueError, match="no"):
        model(x_of())
    Model()(x_of())
    probe.detach()
    assert probe.names == ["last"]


def test_threads_running_different_models_do_not_mix() -> None:
    models = [Model(blocks=1) for _ in range(4)]
    probes = [Seen("last") for _ in models]
    for model, probe in zip(models, probes, strict=True):
        probe.attach(model)
    outputs: dict[int, list[torch.Tensor]] = {i: [] for i in range(4)}

    def run(i: int) -> None:
        for _ in range(50):
            outputs[i].append(models[i](torch.full((1, 4), float(i))))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, probe in enumerate(probes):
        probe.detach()
        assert [id(call.output) for call in probe.calls] == [id(out) for out in outputs[i]]
        assert {call.index for call in probe.calls} == {0}


def test_names_that_never_occurred_are_told_once_with_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, probe = Model(), Seen("lost", "block.*.score", "block.**")
    probe.attach(model)
    assert probe.attachment is not None
    model(x_of())
    model(x_of())
    probe.detach()
    (record,) = caplog.records
    text = record.getMessage()
    assert "saw no value named 'lost', 'block.*.score'" in text
    assert "The names there are 'block.0.scores', 'block.1.scores', 'last'" in text
    assert "Did you mean 'last'?" in text


def test_a_probe_that_is_off_sees_nothing_and_leaves_nothing() -> None:
    model, probe = Model(), Seen("last")
    attachment = probe.attach(model)
    attachment.disable()
    assert not taps_module._enabled
    model(x_of())
    assert probe.calls == []
    attachment.enable()
    model(x_of())
    assert probe.names == ["last"]
    probe.detach()


def test_a_model_that_is_gone_takes_its_probe_along() -> None:
    model, probe = Model(), Seen("last")
    probe.attach(model)
    model(x_of())
    there = weakref.ref(model)
    del model, probe
    gc.collect()
    assert there() is None
    assert not taps_module._enabled


# -- edits and activation checkpointing -----------------------------------------------------------


class DoubledByHand(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block.inner(x) * 2)
        return x


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant"])
def test_a_value_is_seen_once_and_an_edit_applied_again_under_checkpointing(how: str) -> None:
    model, edit, probe = Model(how), Double("block.*.scores"), Seen("**")
    edit.attach(model)
    probe.attach(model)
    edited = gradients(model, x_of())
    edit.detach()
    probe.detach()
    for got, expected in zip(edited, gradients(DoubledByHand(), x_of()), strict=True):
        torch.testing.assert_close(got, expected)
    assert probe.names == ["block.0.scores", "block.1.scores", "last"]
    assert not torch.allclose(edited[0], gradients(Model(), x_of())[0])


class WithFunction(nn.Module):
    """Checkpoints a function that knows no module."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def segment(y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(tap(y.sin(), "y"))

        y: Any = checkpoint(segment, x * self.weight, use_reentrant=self.how == "reentrant")
        return y


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_an_edit_within_a_checkpointed_function_is_applied_again(how: str) -> None:
    model, edit = WithFunction(how), Double("y")
    edit.attach(model)
    x = x_of()
    (got,) = gradients(model, x)
    edit.detach()
    weight = torch.ones(4, requires_grad=True)
    torch.tanh((x * weight).sin() * 2).square().sum().backward()
    torch.testing.assert_close(got, weight.grad)


def test_an_edit_whose_model_cannot_be_told_in_a_recomputation_is_an_error() -> None:
    model, other, edit = WithFunction("non-reentrant"), WithFunction("non-reentrant"), Double("y")
    edit.attach(model)
    model(x_of())
    out = other(x_of())
    with pytest.raises(ProbeError, match="also named outside of the model's forward"):
        out.sum().backward()
    edit.detach()


# -- compiled models ------------------------------------------------------------------------------


def compiled(model: nn.Module, backend: str = "aot_eager") -> tuple[Any, Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


def operators(counter: Any, graph: int = -1) -> list[str]:
    nodes = counter.graphs[graph].graph.nodes
    return [str(node.target) for node in nodes if node.op.startswith("call")]


def model_graphs(counter: Any) -> int:
    """How often the model was compiled; hooks on it that dynamo compiles by themselves apart."""
    graphs = [operators(counter, i) for i in range(len(counter.graphs))]
    return sum("<built-in function linear>" in graph for graph in graphs)


@pytest.mark.slow
def test_without_probes_taps_compile_away() -> None:
    class Untapped(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + torch.tanh(block.inner(x))
            return x

    model, counter = compiled(Model())
    model(x_of())
    plain, plain_counter = compiled(Untapped())
    plain(x_of())
    assert operators(counter) == operators(plain_counter)


@pytest.mark.slow
def test_a_probe_attached_before_compiling_sees_taps_and_is_toggled_without_compiling() -> None:
    inner, probe = Model(), Seen("**")
    attachment = probe.attach(inner)
    model, counter = compiled(inner)
    x, plain = x_of(), gradients(Model(), x_of())
    for got, expected in zip(gradients(model, x), plain, strict=True):
        torch.testing.assert_close(got, expected)
    assert probe.names == ["block.0.scores", "block.1.scores", "last"]
    assert all(call.compiled and call.index == 0 for call in probe.calls)
    torch.testing.assert_close(probe.calls[0].output, inner.blocks[0].inner(x).detach())
    other = torch.compile(Model(), fullgraph=True, backend="aot_eager")  # it shares the code
    torch.testing.assert_close(other(x), Model()(x))
    assert len(probe.calls) == 3
    for _ in range(3):
        attachment.disable()
        model(x)
        assert len(probe.calls) == 3
    attachment.enable()
    model(x)
    assert len(probe.calls) == 6
    assert model_graphs(counter) == 1
    probe.detach()
    for got, expected in zip(gradients(model, x), plain, strict=True):
        torch.testing.assert_close(got, expected)


def test_an_edit_of_a_tap_in_a_compiled_model_is_an_error() -> None:
    inner, edit = Model(), Double("last")
    edit.attach(inner)
    model, _ = compiled(inner)
    with pytest.raises(ProbeError, match="An edit of a tap needs a model that is not"):
        model(x_of())
    edit.detach()


@pytest.mark.slow
def test_a_probe_attached_after_compiling_is_compiled_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner, probe = Model(), Seen("last")
    other = Model()
    model, counter = compiled(inner)
    model(x_of())
    for _ in range(10):
        attachment = probe.attach(inner)
        model(x_of())
        attachment.disable()
        model(x_of())
        probe.detach()
        model(x_of())
    assert model_graphs(counter) == 2
    assert probe.names == ["last"] * 10
    # The code is shared with other models, and what was compiled of it, too.
    probe.attach(inner)
    torch.compile(other, fullgraph=True, backend=counter)(x_of())
    assert len(probe.calls) == 10
    probe.detach()
    assert not [record for record in caplog.records if record.name == "hookline"]


class Calls(nn.Module):
    """Calls itself, some times over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        x = self.inner(x)
        x = self(x, times - 1) if times > 1 else x
        return tap(x, "here")
