"""Calls of torch's clipping functions are noticed by every way of calling them, and only then."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

from hookline.errors import LoopError
from hookline.loop import clip_watch
from hookline.loop.clip_watch import (
    ClipCall,
    clip_patch,
)


class Listener:
    def __init__(self) -> None:
        self.before: list[tuple[str, int, float | None]] = []
        self.after: list[tuple[str, Any]] = []

    def before_clip(self, call: ClipCall) -> None:
        self.before.append((call.function, len(call.tensors), call.norm_type))

    def after_clip(self, call: ClipCall) -> None:
        self.after.append((call.function, None if call.result is None else call.result.item()))


@pytest.fixture
def listener():
    one = Listener()
    clip_patch.add(one)
    yield one
    clip_patch.remove(one)


@pytest.fixture
def model():
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    return model


NORM = 2.0 * 8**0.5


def test_what_this_relies_on_in_torch_is_there():
    for name in clip_watch._FUNCTIONS:
        assert getattr(clip_grad, name).__code__.co_freevars == ("func",), name
    assert utils.get_total_norm is clip_grad._get_total_norm
    assert utils.clip_grads_with_norm_ is clip_grad._clip_grads_with_norm_


def test_another_torch_is_an_error_that_names_the_function(monkeypatch):
    monkeypatch.setattr(clip_grad, "clip_grad_value_", lambda parameters, value: None)
    with pytest.raises(LoopError, match=r"torch .*clip_grad\.clip_grad_value_"):
        clip_patch.add(Listener())
    monkeypatch.undo()
    assert not clip_patch
    assert not clip_patch._replaced


def test_torch_is_as_it_was_when_the_last_listener_has_left(model):
    cells = {name: clip_watch._cell_of(name) for name in clip_watch._FUNCTIONS}
    originals = {name: cell.cell_contents for name, cell in cells.items()}
    first, second = Listener(), Listener()
    clip_patch.add(first)
    clip_patch.add(second)
    clip_grad_norm_(model.parameters(), 1.0)
    clip_patch.remove(first)
    clip_grad_norm_(model.parameters(), 1.0)
    clip_patch.remove(second)
    clip_patch.remove(second)  # once is enough, twice does no harm
    clip_grad_norm_(model.parameters(), 1.0)
    assert (len(first.before), len(second.before)) == (1, 2)
    assert {name: cell.cell_contents for name, cell in cells.items()} == originals


def test_an_error_in_torch_or_in_a_listener_leaves_calls_noticed(listener, model):
    with pytest.raises(RuntimeError, match="non-finite"):
        model.weight.grad.fill_(float("nan"))
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert listener.after == []
    clip_grad_value_(model.parameters(), 1.0)
    assert [name for name, *_ in listener.before] == ["clip_grad_norm_", "clip_grad_value_"]


def test_a_clip_in_a_compiled_function_runs_eagerly_or_is_an_error(model):
    compiling = []

    class Looking(Listener):
        def before_clip(self, call: ClipCall) -> None:
            super().before_clip(call)
            compiling.append(torch.compiler.is_compiling())

    parameters = list(model.parameters())
    in_parts = torch.compile(lambda: clip_grad_norm_(parameters, 1.0), backend="eager")
    whole = torch.compile(lambda: clip_grad_norm_(parameters, 1.0), backend="eager", fullgraph=True)
    in_parts(), whole()  # compiled before anybody listens
    listener = Looking()
    clip_patch.add(listener)
    try:
        in_parts()
        assert compiling == [False]
        with pytest.raises(Exception, match="Call it outside the compiled function"):
            whole()
    finally:
        clip_patch.remove(listener)
    whole()
    assert len(listener.before) == 1
