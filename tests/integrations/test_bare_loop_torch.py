"""The truths of PyTorch that a bare loop brings along: closures, compiling, checkpointing, DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loops import Net, batches, make, recorder, run_on_two_ranks, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import LoopError, NotSuppliedError

# -- closures -------------------------------------------------------------------------------------


def closure_of(model, optimizer, x, y, losses):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        return loss

    return closure


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_with_a_closure_gradients_are_told_after_it_has_run(by):
    seen = {}

    class Gradients(hookline.Hook):
        def on_gradients_ready(self, model):
            seen["ready"] = model.first.weight.grad.clone()

        def on_before_optimizer_step(self, model):
            seen["before"] = model.first.weight.grad.clone()

        def on_step_end(self, loss, step):
            seen["loss"], seen["step"] = float(loss), step

    model, optimizer = make()
    losses: list[float] = []
    x, y = batches(1)[0]
    before = model.first.weight.detach().clone()
    with hookline.attach(model, optimizer, hooks=[Gradients()]):
        closure = closure_of(model, optimizer, x, y, losses)
        result = optimizer.step(closure) if by == "position" else optimizer.step(closure=closure)
    used = (before - model.first.weight.detach()) / 0.1
    torch.testing.assert_close(seen["ready"], used, rtol=1e-4, atol=1e-6)
    assert torch.equal(seen["ready"], seen["before"])
    assert (seen["loss"], seen["step"]) == (losses[0], 1)
    assert result.item() == losses[0]


class CallsBaseClass(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("with_closure", [False, True])
def test_an_optimizer_that_calls_the_step_of_its_base_class_makes_one_step(with_closure):
    model, _ = make()  # with an SGD: from here on, PyTorch calls hooks for the inner step, too
    optimizer = CallsBaseClass(model.parameters(), lr=0.1)
    hook = recorder("on_before_optimizer_step", "on_after_optimizer_step", "on_step_end")

    def fail() -> None:
        raise ZeroDivisionError

    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for x, y in batches(3):
            closure = closure_of(model, optimizer, x, y, [])
            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            with pytest.raises(ZeroDivisionError):
                optimizer.step(fail)
    assert session.step == 3
    step = ["on_before_optimizer_step", "on_after_optimizer_step", "on_step_end"]
    assert hook.told == step * 3


def test_a_loop_may_step_with_a_closure_now_and_then():
    hook = recorder("on_after_backward", "on_gradients_ready", on_step_end=("step", "loss"))
    model, optimizer = make()
    x, y = batches(1)[0]
    losses: list[float] = []
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses += train(model, optimizer, batches(2))
        optimizer.step(closure_of(model, optimizer, x, y, losses))
        losses += train(model, optimizer, batches(1))
    assert [t for t in hook.told if isinstance(t, str)] == [
        "on_after_backward",
        "on_gradients_ready",
    ] * 4
    told = [t[1] for t in hook.told if not isinstance(t, str)]
    assert [(t["step"], float(t["loss"])) for t in told] == list(enumerate(losses, 1))


def test_lbfgs_steps_once_and_its_loss_is_that_of_the_first_evaluation():
    hook = recorder("on_after_backward", "on_after_optimizer_step", on_step_end=("loss",))
    model, _ = make()
    model.eval()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    losses: list[float] = []
    x, y = batches(1)[0]
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        optimizer.step(closure_of(model, optimizer, x, y, losses))
    assert len(losses) > 1
    assert hook.told.count("on_after_backward") == len(losses)
    assert hook.told[-2] == "on_after_optimizer_step"
    assert float(hook.told[-1][1]["loss"]) == losses[0]
    assert session.step == 1


@pytest.mark.parametrize(
    "hook",
    [
        recorder("on_gradients_ready"),
        recorder("on_before_optimizer_step"),
        recorder(on_step_end=("grad_norm",)),
    ],
    ids=["ready", "before", "norm"],
)
def test_hooks_that_ask_lbfgs_for_the_gradients_it_uses_are_refused(hook):
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters())
    x, y = batches(1)[0]
    with pytest.raises(LoopError, match="LBFGS evaluates its closure many times"):
        hookline.attach(model, optimizer, hooks=[hook])
    with hookline.attach(model, optimizer) as session:  # nor in the middle of training
        optimizer.step(closure_of(model, optimizer, x, y, []))
        with pytest.raises(LoopError, match="LBFGS evaluates its closure many times"):
            session.add_hook(hook)
        optimizer.step(closure_of(model, optimizer, x, y, []))
    assert session.step == 2
    assert session.hooks.list_hooks() == []


# -- compiling ------------------------------------------------------------------------------------

EVERYTHING = (
    "on_before_forward",
    "on_after_forward",
    "on_after_backward",
    "on_gradients_ready",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_compiled_model_is_seen_when_it_is_what_was_attached(backend):
    model, optimizer = make()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    hook = recorder(*EVERYTHING, on_step_end=("loss",))
    with hookline.attach(compiled, optimizer, hooks=[hook]):
        losses = train(compiled, optimizer, batches(3))
    names = [told for told in hook.told if isinstance(told, str)]
    assert names == list(EVERYTHING) * 3
    assert [float(t[1]["loss"]) for t in hook.told if not isinstance(t, str)] == losses


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_module_inside_a_compiled_one_is_seen_too(when):
    model, optimizer = make()
    compiled = torch.compile(model, backend="eager")
    if when == "after":
        compiled(batches(1)[0][0])
    hook = recorder(*EVERYTHING)
    with hookline.attach(model, optimizer, hooks=[hook]):
        train(compiled, optimizer, batches(2))
    assert hook.told == list(EVERYTHING) * 2
    torch.compiler.reset()


def test_where_compiling_hides_the_module_inside_it_is_refused_not_missed():
    model = nn.Linear(8, 4)  # of torch's own modules not even the call is left
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    compiled(batches(1)[0][0])
    with (
        pytest.raises(NotSuppliedError, match="compiled or wrapped model, not the one inside"),
        hookline.attach(model, optimizer, hooks=[recorder("on_after_forward")]),
    ):
        train(compiled, optimizer, batches(1))
    torch.compiler.reset()


def test_a_compiled_optimizer_step_is_seen_and_not_compiled_again_and_again():
    model, optimizer = make()
    step = torch.compile(optimizer.step, backend="eager")
    hook = recorder(*EVERYTHING[3:], on_step_end=("step",))
    torch._dynamo.utils.counters.clear()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, y in batches(12):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            step()
    assert [t[1]["step"] for t in hook.told if not isinstance(t, str)] == list(range(1, 13))
    assert [t for t in hook.told if isinstance(t, str)] == list(EVERYTHING[3:]) * 12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    torch.compiler.reset()


# -- activation checkpointing ---------------------------------------------------------------------


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_()
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.second(torch.relu(hidden))


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointing_inside_the_model_is_one_forward_and_one_backward(reentrant):
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = recorder(*EVERYTHING, on_step_end=("loss",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = train(model, optimizer, batches(2))
    assert [t for t in hook.told if isinstance(t, str)] == list(EVERYTHING) * 2
    assert [float(t[1]["loss"]) for t in hook.told if not isinstance(t, str)] == losses


def test_the_recomputation_of_a_whole_checkpointed_model_is_not_told():
    model, optimizer = make()
    hook = recorder(*EVERYTHING)
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, y in batches(2):
            optimizer.zero_grad()
            F.mse_loss(checkpoint(model, x, use_reentrant=False), y).backward()
            optimizer.step()
    assert hook.told == list(EVERYTHING) * 2


def test_a_whole_model_under_reentrant_checkpointing_has_no_forward():
    """Its first pass runs under `no_grad`, which is not training."""
    model, optimizer = make()
    x, y = batches(1)[0]

    def step() -> float:
        loss = F.mse_loss(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    with (
        pytest.raises(NotSuppliedError, match="was not called"),
        hookline.attach(model, optimizer, hooks=[recorder("on_after_forward")]),
    ):
        step()
    hook = recorder("on_after_backward", on_step_end=("loss",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        loss = step()
    assert hook.told == ["on_after_backward", ("on_step_end", {"loss": loss})]


# -- many processes -------------------------------------------------------------------------------

DDP_SCRIPT = """
import os, sys
import torch, torch.distributed as dist, hookline
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class Gradients(hookline.Hook):
    def on_after_backward(self, model):
        mine = model.module.weight.grad.clone()
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(both[0], both[1]), "on_after_backward came before the averaging"
    def on_step_end(self, step, loss):
        assert float(loss) == expected.item()
        print(f"rank {rank} step {step} fine", flush=True)
settings = hookline.HookSettings(isolate=False)
with hookline.attach(model, optimizer, hooks=[Gradients()], settings=settings):
    for i in range(2):
        optimizer.zero_grad()
        expected = model(torch.full((2, 4), float(rank + i))).pow(2).mean()
        expected.backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo threads sometimes abort the interpreter while it exits
"""


@pytest.mark.slow
def test_under_ddp_backward_has_ended_when_gradients_are_averaged(tmp_path: Path):
    assert run_on_two_ranks(DDP_SCRIPT, tmp_path).count("fine") == 4


# -- compiled in place ----------------------------------------------------------------------------


def test_calls_of_a_model_that_was_compiled_in_place_are_seen():
    """Outside of what is compiled: hooks are no part of the graph, and break none."""
    plain, optimizer = make()
    losses = train(plain, optimizer, batches(3))
    torch.compiler.reset()
    model, optimizer = make()
    model.compile(backend="eager", fullgraph=True)
    compiled_call = model._compiled_call_impl
    hook = recorder("on_before_forward", "on_after_forward", on_step_end=("loss", "grad_norm"))
    seen = []
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        session.add_hook(lambda activations: seen.append(activations), kind="forward")
        assert train(model, optimizer, batches(3)) == losses
        with torch.no_grad():
            model(batches(1)[0][0])
        with pytest.raises(Exception, match=r"shape|size"):
            model(torch.ones(2, 3))
        train(model, optimizer, batches(1))
    assert model._compiled_call_impl is compiled_call
    step = ["on_before_forward", "on_after_forward", "on_step_end"]
    names = [told if isinstance(told, str) else told[0] for told in hook.told]
    assert names == [*step * 3, "on_before_forward", *step]
    assert len(seen) == 4
    torch.compiler.reset()
