"""Checks of rule 2: the life of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lint_loops import batch, ids, layers, lint, loss_of
from rank_checks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import hookline


def run(
    step: Callable[[nn.Module, torch.optim.Optimizer, int], None], *, steps: int = 8
) -> list[Any]:
    """Return the findings of a loop with one model and SGD."""
    model = layers()
    optimizer = SGD(model.parameters(), lr=0.01)
    return lint(model, optimizer, steps=steps, step_fn=partial(step, model, optimizer))


# -- gradients-not-zeroed --------------------------------------------------------------------------


def test_gradients_that_nobody_zeroes_are_found() -> None:
    def step(model: nn.Module, optimizer: Any, i: int) -> None:
        loss_of(model, i).backward()
        optimizer.step()

    (finding,) = run(step)
    assert (finding.check, finding.subject, finding.step) == ("gradients-not-zeroed", "SGD", 3)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_zeroed_and_accumulated_gradients_are_no_finding(set_to_none: bool, when: str) -> None:
    def step(model: nn.Module, optimizer: Any, i: int) -> None:
        if when == "before":
            optimizer.zero_grad(set_to_none=set_to_none)
        for k in range(3):
            (loss_of(model, 3 * i + k) / 3).backward()
        optimizer.step()
        if when == "after":
            optimizer.zero_grad(set_to_none=set_to_none)

    assert run(step) == []


# -- gradients-zeroed-before-step ------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_before_the_step_are_found(set_to_none: bool) -> None:
    def step(model: nn.Module, optimizer: Any, i: int) -> None:
        loss_of(model, i).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()

    (finding,) = run(step)
    assert (finding.check, finding.subject) == ("gradients-zeroed-before-step", "SGD")
    assert finding.step == 2


def test_some_zeroed_gradients_are_no_finding() -> None:
    def skip_some(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        if i % 3 == 1:  # a batch that is left out
            optimizer.zero_grad()
        optimizer.step()

    def freeze_first(model: Any, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        model.first.weight.grad.zero_()
        optimizer.step()

    assert run(skip_some) == []
    assert run(freeze_first) == []


# -- clip-without-effect ---------------------------------------------------------------------------


def test_clipping_after_the_step_is_found() -> None:
    def step(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
        clip_grad_norm_(model.parameters(), 1.0)

    (finding,) = run(step)
    assert (finding.check, finding.subject, finding.step) == ("clip-without-effect", "SGD", 3)
    assert "after the step" in finding.message


def test_clipping_before_backward_is_found() -> None:
    def step(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, i)
        clip_grad_norm_(model.parameters(), 1.0)
        loss.backward()
        optimizer.step()

    (finding,) = run(step)
    assert (finding.check, finding.step) == ("clip-without-effect", 2)
    assert "before backward" in finding.message


def test_usual_clipping_and_norms_for_logs_are_no_finding() -> None:
    def usual(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        clip_grad_norm_(model.parameters(), 1e-3)
        clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()

    def for_logs(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
        clip_grad_norm_(model.parameters(), float("inf"))

    def each_micro_batch(model: nn.Module, optimizer: Any, i: int) -> None:
        for k in range(2):
            loss_of(model, 2 * i + k).backward()
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def in_parts(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        for child in model.children():
            clip_grad_norm_(child.parameters(), 1.0)
        optimizer.step()

    for step in (usual, for_logs, each_micro_batch, in_parts):
        assert run(step) == [], step


# -- clipped-while-scaled, fp16-without-scaler -----------------------------------------------------


def _amp(unscales: bool = True, clips: float | None = 0.1, scale: float = 1024.0) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, i)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if clips:
            clip_grad_norm_(model.parameters(), clips)
        scaler.step(optimizer)
        scaler.update()

    return step


def test_clipping_of_scaled_gradients_is_found() -> None:
    (finding,) = run(_amp(unscales=False))
    assert (finding.check, finding.subject, finding.step) == ("clipped-while-scaled", "SGD", 1)
    assert "1024" in finding.message


def test_scaling_as_it_should_be_is_no_finding() -> None:
    assert run(_amp()) == []
    assert run(_amp(unscales=False, clips=None)) == []
    assert run(_amp(unscales=False, clips=float("inf"))) == []
    assert run(_amp(unscales=False, scale=1.0)) == []


def _in_half(dtype: torch.dtype, factor: float | None = None) -> Any:
    def step(model: nn.Module, optimizer: Any, i: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, i)
        if factor is None:
            loss.backward()
        else:
            (loss * factor).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= factor
        optimizer.step()

    return step


def test_float16_without_a_scaler_is_found() -> None:
    (finding,) = run(_in_half(torch.float16))
    assert (finding.check, finding.subject) == ("fp16-without-scaler", "first")
    assert finding.step == 2


def test_bfloat16_and_scaling_by_hand_are_no_finding() -> None:
    assert run(_in_half(torch.bfloat16)) == []
    assert run(_in_half(torch.float16, 256.0)) == []

    def frozen_in_half(model: Any, optimizer: Any, i: int) -> None:
        model.first.requires_grad_(False)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            h = model.first(batch(i)[0]).float()
        model.last(torch.relu(model.middle(h))).square().mean().backward()
        optimizer.step()

    assert run(frozen_in_half) == []


# -- scheduler-steps-too-often ---------------------------------------------------------------------


_TOO_EARLY = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def _accumulate(make: Any, per_batch: bool, loader: Any = None, steps: int = 8) -> list[Any]:
    model = layers()
    optimizer = SGD(model.parameters(), lr=0.01)
    scheduler = make(optimizer)
    hook = hookline.Lint()
    data = loader or [batch(i) for i in range(4 * steps)]
    with hookline.attach(model, optimizer, hooks=[hook]):
        for i, (x, y) in enumerate(data):
            (F.mse_loss(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            if per_batch or i % 4 == 3:
                scheduler.step()
    return hook.findings


def _exponential(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.99)


def _cosine(length: int) -> Any:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, length)


def _loader() -> Any:
    return DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 4)), batch_size=1)


@_TOO_EARLY
def test_a_scheduler_that_steps_per_micro_batch_is_found() -> None:
    (finding,) = _accumulate(_exponential, True)
    assert (finding.check, finding.severity) == ("scheduler-steps-too-often", "warning")
    assert finding.subject == "ExponentialLR"
    assert "4 times" in finding.message
    assert ids(_accumulate(_cosine(8), True, _loader())) == ["scheduler-steps-too-often"]


@_TOO_EARLY
def test_schedulers_that_step_as_they_should_are_no_finding() -> None:
    assert _accumulate(_exponential, False) == []
    assert _accumulate(_cosine(64), True, _loader()) == []  # it counts batches
    assert _accumulate(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50), True) == []

    def chain(optimizer: Any) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, total_iters=3), _exponential(optimizer)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])

    assert _accumulate(chain, False) == []


# -- graph-retained --------------------------------------------------------------------------------


def test_a_sum_of_losses_that_keeps_graphs_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.01)
    total = torch.zeros(())

    def step(i: int) -> None:
        nonlocal total
        optimizer.zero_grad()
        total = total + loss_of(model, i)
        total.backward(retain_graph=True)
        optimizer.step()

    (finding,) = lint(model, optimizer, step_fn=step)
    assert (finding.check, finding.step) == ("graph-retained", 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.cell(x, h)


def test_a_detached_state_and_several_losses_are_no_finding() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    optimizer = SGD(model.parameters(), lr=0.01)
    hidden = torch.zeros(6, 4)

    def step(i: int) -> None:
        nonlocal hidden
        optimizer.zero_grad()
        hidden = model(batch(i)[0], hidden.detach())
        loss = hidden.square().mean()
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        optimizer.step()

    assert lint(model, optimizer, step_fn=step) == []


def test_clipping_by_the_norm_of_a_shard_is_found_on_two_ranks() -> None:
    assert run_ranks("lint_ranks.py").count("fine") == 2
