"""Run by `torchrun` with two ranks: hooks attached to bare loops under DDP, FSDP2 and Accelerate.

Gradients of two ranks are averaged, and their norms summed, in another order than in one process,
in float32: numbers agree to 1e-5. After several steps of SGD the differences have added up: weights
agree to 1e-5, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_checks import check_in_all_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline
from hookline.loop import rank_sync as loop_agreement
from hookline.tensors.name_patterns import module_class
from hookline.tensors.sharded import whole

STEPS = 6
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
DEBUG = hookline.HookSettings(isolate=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 1)  # of the bias one rank has nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def make(kind: str) -> nn.Module:
    model: nn.Module = Model()
    if kind == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare_model(model)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    return model


def batches(rank: int | None) -> Iterator[torch.Tensor]:
    """Yield the batches of a rank, or those of both ranks together."""
    for step in range(STEPS):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        yield batch if rank is None else batch[rank * 4 : rank * 4 + 4]


class Events(hookline.Hook):
    """Records events, on every rank."""

    def __init__(self, clip: bool) -> None:
        self.seen: list[str] = []
        if not clip:
            self.on_gradient_clip = None  # type: ignore[method-assign, assignment]

    def on_train_start(self) -> None:
        self.seen.append("train_start")

    def on_after_forward(self) -> None:
        self.seen.append("after_forward")

    def on_after_backward(self) -> None:
        self.seen.append("after_backward")

    def on_gradients_ready(self) -> None:
        self.seen.append("gradients_ready")

    def on_gradient_clip(self) -> None:
        self.seen.append("gradient_clip")

    def on_step_end(self, step: int) -> None:
        self.seen.append(f"step_end {step}")

    def on_train_end(self) -> None:
        self.seen.append("train_end")


class Norms(hookline.Hook):
    """Records the norms and losses of steps; registered for rank 0 in most tests."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, grad_norm: float, loss: float, ctx: hookline.StepContext) -> None:
        assert ctx.grad_norm == grad_norm
        self.norms.append(grad_norm)
        self.losses.append(loss)


@contextmanager
def closing_session(session: hookline.Session) -> Iterator[None]:
    yield
    session.detach()


def make_optimizer(model: nn.Module, kind: str) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare_optimizer(optimizer)
    return optimizer


def train(
    model: nn.Module,
    hooks: Any,
    rank: int | None,
    *,
    clip: bool,
    kind: str = "",
    settings: hookline.HookSettings = DEBUG,
    **options: Any,
) -> Any:
    optimizer = make_optimizer(model, kind)
    session = hookline.attach(model, optimizer, hooks=hooks, settings=settings, **options)
    # Without `with`, training starts in the first call of the model.
    with session if clip else closing_session(session), session.epoch() if clip else nullcontext():
        for batch in batches(rank):
            model(batch).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            if session.should_stop:
                break
    return session


def registry(*hooks: tuple[hookline.Hook, dict[str, Any]]) -> hookline.HookManager:
    manager = hookline.HookManager()
    for hook, options in hooks:
        manager.add_hook(hook, **options)
    return manager


def recorded(runs: Path) -> dict[str, list[float]]:
    """Return the values of each metric of the only run in a folder."""
    (run,) = runs.iterdir()
    values: dict[str, list[float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        values.setdefault(record["name"], []).append(record["value"])
    return values


class Watched:
    """Hooks that are attached to a loop, and what they have seen."""

    def __init__(self, clip: bool) -> None:
        self.events, self.norms, self.rare = Events(clip), Norms(), Norms()
        self.ema = hookline.EMA(decay=0.9, every_n_steps=1)
        self.capture = hookline.probes.Capture("blocks.*.linear", gradient=True)
        self.hooks = registry(
            (self.events, {}),
            (self.norms, {"ranks": "main"}),
            (self.rare, {"ranks": "main", "every": 3, "name": "rare"}),
            (hookline.GradientMonitor(2, log_statistics=True), {}),
            (hookline.OptimizerMonitor(2), {}),
            (self.ema, {}),
            (self.capture, {}),
            (hookline.probes.Monitor("blocks.*", ["max", "zeros"]), {"every": 2}),
        )


def check_numbers(kind: str, folder: Path, *, clip: bool) -> None:
    rank = dist.get_rank()
    alone, seen_alone = Model(), Watched(clip)
    runs_alone = folder / f"alone_{kind}_{clip}"
    train(alone, seen_alone.hooks, None, clip=clip, runs=runs_alone)
    model, seen = make(kind), Watched(clip)
    runs = folder / f"{kind}_{clip}"
    session = train(model, seen.hooks, rank, clip=clip, kind=kind, runs=runs)
    assert seen.events.seen == seen_alone.events.seen
    assert len(seen.rare.norms) == (2 if rank == 0 else 0)
    for a, b in ((seen.norms, seen_alone.norms), (seen.rare, seen_alone.rare)):
        torch.testing.assert_close(a.norms, b.norms, **TOLERANCE)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(a.detach()), b.detach(), **TOLERANCE)
    check_averages(seen.ema, seen_alone.ema)
    check_captured(seen.capture, seen_alone.capture)
    # Only rank 0 writes. A step's loss, and what is measured of gradients, is that of both ranks.
    dist.barrier()
    assert (session.run is not None) == (rank == 0)
    found, expected = recorded(runs), recorded(runs_alone)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    names = {name for name in found if not name.startswith("probes/")}
    assert {"train/loss", "gradients/total/norm", "gradients/head.bias/norm"} <= names
    assert any("update_ratio" in name for name in names), names
    assert any("std" in name for name in names), names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], **TOLERANCE, msg=name)
    # A monitor of outputs measures what its rank computes: half of the batch.
    for name in found.keys() - names:
        if name.endswith("/max"):
            assert all(a <= b + 1e-5 for a, b in zip(found[name], expected[name], strict=True))


def check_averages(ema: hookline.EMA, alone: hookline.EMA) -> None:
    averages, expected = (one.state_dict()["averages"] for one in (ema, alone))
    assert averages.keys() == expected.keys()  # names without the wrappers' prefixes
    for name, average in averages.items():
        torch.testing.assert_close(whole(average), expected[name], **TOLERANCE)


def check_captured(capture: Any, alone: Any) -> None:
    """Each rank captures plain tensors of its half of the batch."""
    rank = dist.get_rank()
    assert list(capture) == list(alone) == ["blocks.0.linear", "blocks.1.linear"]
    for name in capture:
        found, expected = capture[name].output, alone[name].output
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected[rank * 4 : rank * 4 + 4], **TOLERANCE)


def check_decisions(kind: str) -> None:
    """Stops, skips and toggles of one rank happen on both, at the same step."""
    rank = dist.get_rank()
    skipped: list[tuple[int, str]] = []
    counts = {"toggled": 0, "late": 0}

    class Decides(hookline.Hook):
        def on_gradients_ready(self, trainer: Any, step: int) -> None:
            if rank == 1 and step == 1 and not skipped:
                trainer.skip_optimizer_step(None, "rank 1 asked")

        def on_step_skipped(self, step: int, reason: str) -> None:
            skipped.append((step, reason))

        def on_step_end(self, trainer: Any, step: int) -> None:
            if rank == 0 and step == 2:
                trainer.disable_hook("toggled")
            if rank == 1 and step == 2:
                trainer.enable_hook("late")
            if rank == 1 and step == 4:
                trainer.stop("rank 1 asked")

    class Counts(hookline.Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_step_end(self, grad_norm: float) -> None:
            assert grad_norm == grad_norm
            counts[self.name] += 1

    model = make(kind)
    hooks = registry(
        (Counts("toggled"), {"name": "toggled"}),
        (Counts("late"), {"name": "late", "enabled": False}),
        (Decides(), {"name": "decides"}),
    )
    session = train(model, hooks, rank, clip=False)
    assert session.step == 4
    assert session.status == "stopped"
    assert skipped == [(1, "rank 1 asked" if rank == 1 else "another process asked")]
    # Steps 1 and 2 and the skipped one; the late one in steps 3 and 4.
    assert counts == {"toggled": 3, "late": 2}, counts
    states = [whole(parameter.detach()) for parameter in model.parameters()]
    for state in states:
        other = [torch.empty_like(state) for _ in range(2)]
        dist.all_gather(other, state.contiguous())
        assert torch.equal(*other)


def check_names() -> None:
    """Names are those of the model as it was written, and classes those that it has."""
    for kind in ("ddp", "fsdp"):
        model = make(kind)
        with hookline.probe(model, Block) as seen:
            model(next(batches(0)))
        assert list(seen) == ["blocks.0", "blocks.1"], list(seen)
        with hookline.probe(model, "blocks.*.linear") as seen:
            model(next(batches(0)))
        assert list(seen) == ["blocks.0.linear", "blocks.1.linear"]
        assert module_class(model) is Model
        with pytest.raises(hookline.ConfigError, match="'Model', 'Sequential', 'Block'"):
            hookline.probe(model, nn.Conv2d)


def check_failing_hook(kind: str) -> None:
    """A hook that fails on one rank does not stop the others, nor training."""
    rank = dist.get_rank()

    class Fails(hookline.Hook):
        def __init__(self) -> None:
            self.calls = 0

        def on_step_end(self, grad_norm: float, step: int) -> None:
            self.calls += 1
            if rank == 1:
                raise ValueError(step)

    class Critical(hookline.Hook):
        critical = True

        def on_step_end(self, step: int) -> None:
            pass

    fails = Fails()
    session = train(
        make(kind), [fails, Critical()], rank, clip=True, settings=hookline.HookSettings()
    )
    assert session.step == STEPS
    assert session.status == "completed"
    # After three failures it is disabled, in both processes.
    assert fails.calls == 3
    steps = [None, None]
    dist.all_gather_object(steps, session.step)
    assert steps == [STEPS, STEPS]


@contextmanager
def short_limit() -> Iterator[None]:
    limit, loop_agreement._SECONDS = loop_agreement._SECONDS, 2.0
    yield
    loop_agreement._SECONDS = limit


def check_errors() -> None:
    model = make("fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with short_limit():
        if dist.get_rank() == 0:
            with (
                pytest.raises(hookline.LoopError, match="Rank 1 has not attached"),
                hookline.attach(model, optimizer, hooks=[Norms()]),
            ):
                pass
    dist.barrier()
    hooks = [Norms()] if dist.get_rank() == 0 else [Norms(), Events(False)]
    with (
        pytest.raises(hookline.LoopError, match=r"\['norms', 'events'\]"),
        hookline.attach(model, optimizer, hooks=hooks),
    ):
        pass


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    kinds = ("ddp", "fsdp")
    check_in_all_ranks(
        *(partial(check_numbers, kind, folder, clip=c) for kind in kinds for c in (False, True)),
        *(partial(check_decisions, kind) for kind in kinds),
        *(partial(check_failing_hook, kind) for kind in kinds),
        check_names,
        check_errors,
        partial(check_numbers, "accelerate", folder, clip=True),
    )
