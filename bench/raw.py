"""A bare loop under `hookline.attach`: ten do-nothing hooks with two events each, over none.

The model is as small as they come, so that what hooks cost cannot hide. Which two events it is
matters (each makes PyTorch call us in another place), so several pairs are measured, and the worst
of them has to keep the limit. Every round attaches anew, before the timed steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import mse_loss

import hookline
from bench import peers
from bench.data import Batches
from bench.harness import Candidate, Row, interleave

__all__ = ["run"]

TEN = 10
LIMIT = 1.15
EVERYTHING_LIMIT = 1.45  # it computes a norm, which alone is 1.15 to 1.2 in a loop without hooks
BACKWARD_LIMIT = 1.08
WARMUP = 60  # steps; the first firings of an event are all timed


def bare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Any]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


class Start(hookline.Hook):
    def on_train_start(self) -> None: ...

    def on_step_end(self) -> None: ...


class BeforeStep(hookline.Hook):
    def on_before_optimizer_step(self) -> None: ...

    def on_step_end(self) -> None: ...


class Backward(hookline.Hook):
    def on_after_backward(self) -> None: ...

    def on_step_end(self) -> None: ...


class Forward(hookline.Hook):
    def on_before_forward(self) -> None: ...

    def on_after_forward(self) -> None: ...


class Rate(hookline.Hook):
    def on_step_end(self, step: int, lr: float) -> None: ...

    def on_after_optimizer_step(self) -> None: ...


class Everything(hookline.Hook):
    def on_train_start(self) -> None: ...

    def on_step_end(self, step: int, loss: float, grad_norm: float, lr: float) -> None: ...


BACKWARD = "on_after_backward, on_step_end"
PAIRS: dict[str, type[hookline.Hook]] = {
    "on_step_end, on_train_start": Start,
    "on_before_optimizer_step, on_step_end": BeforeStep,
    BACKWARD: Backward,
    "on_before_forward, on_after_forward": Forward,
    "on_step_end(step, lr), on_after_optimizer_step": Rate,
}
EVERYTHING = "on_step_end(step, loss, grad_norm, lr), on_train_start"


OWN = "PyTorch's own part of on_after_backward: a hook on the output, a callback at the end"


def run(*, quick: bool) -> list[Row]:
    steps, rounds = (200, 8) if quick else (400, 40)
    candidates: dict[str, Candidate] = {
        "bare": partial(_timed, None, steps),
        "bare again": partial(_timed, None, steps),
        OWN: partial(_timed, None, steps, own_hooks=True),
        **{name: partial(_timed, hook, steps) for name, hook in PAIRS.items()},
        EVERYTHING: partial(_timed, Everything, steps),
        **peers.loops(hooks=TEN, steps=steps, warmup=WARMUP),
    }
    measured = interleave(candidates, rounds=rounds, warmup=1)
    ratios = {name: measured.ratio(name, "bare") for name in candidates}
    worst = max(PAIRS, key=lambda name: ratios[name].median)
    micro = {name: f"{measured.time(name) * 1e6:.1f} µs" for name in candidates}
    return [
        Row(
            "attach, ten hooks on two events each, over the bare loop: the worst pair",
            ratios[worst],
            "×",
            limit=LIMIT,
            note=f"bare {micro['bare']} per step; the worst is {worst}",
            peers={
                name: f"{ratios[name].median:.2f} × ({micro[name]})"
                for name in peers.NAMES
                if name in measured
            },
        ),
        *(Row(f"    {name}", ratios[name], "×", LIMIT, note=micro[name]) for name in PAIRS),
        Row(f"    {EVERYTHING}", ratios[EVERYTHING], "×", EVERYTHING_LIMIT, note=micro[EVERYTHING]),
        Row(f"    {OWN}", ratios[OWN], "×", note=micro[OWN]),
        Row(
            "    ten hooks on on_after_backward, over PyTorch's own part",
            measured.ratio(BACKWARD, OWN),
            "×",
            limit=BACKWARD_LIMIT,
        ),
        Row("    the bare loop over itself (the noise)", ratios["bare again"], "×"),
    ]


def _timed(hook: type[hookline.Hook] | None, steps: int, *, own_hooks: bool = False) -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    if own_hooks:
        model.register_forward_hook(_end_of_backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = Batches(steps, WARMUP)
    if hook is None:
        bare(model, optimizer, batches)
    else:
        with hookline.attach(model, optimizer, hooks=[hook() for _ in range(TEN)]):
            bare(model, optimizer, batches)
    return batches.seconds_per_step


def _end_of_backward(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
    """The least that tells the end of backward: below this, nobody can be."""
    engine = torch.autograd.Variable._execution_engine
    output.register_hook(lambda grad: engine.queue_callback(lambda: None))
