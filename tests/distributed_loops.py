"""Run by `torchrun` with two ranks: hooks attached to bare loops under DDP and FSDP2.

Gradients of two ranks are averaged, and their norms summed, in another order than in one process,
in float32: numbers agree to 1e-5. After several steps of SGD the differences have added up: weights
agree to 1e-5, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline
from hookline.integrations.bare_loop import loop_agreement
from hookline.tensors.module_classes import module_class
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


def train(model: nn.Module, hooks: Any, rank: int | None, *, clip: bool, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hookline.attach(model, optimizer, hooks=hooks, settings=DEBUG, **options)
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


def check_numbers(kind: str, folder: Path, *, clip: bool) -> None:
    rank = dist.get_rank()
    alone, events_alone, norms_alone = Model(), Events(clip), Norms()
    train(alone, [events_alone, norms_alone], None, clip=clip)
    model, events, norms, rare = make(kind), Events(clip), Norms(), Norms()
    monitor = hookline.GradientMonitor(2, update_ratio=True)
    runs = folder / f"{kind}_{clip}"
    hooks = registry(
        (events, {}),
        (norms, {"ranks": "main"}),
        (rare, {"ranks": "main", "every": 3, "name": "rare"}),
        (monitor, {}),
    )
    session = train(model, hooks, rank, clip=clip, runs=runs)
    assert events.seen == events_alone.seen, (events.seen, events_alone.seen)
    if rank == 0:
        torch.testing.assert_close(norms.norms, norms_alone.norms, **TOLERANCE)
        torch.testing.assert_close(rare.norms, norms_alone.norms[2::3], **TOLERANCE)
    else:
        assert not norms.norms
        assert not rare.norms
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(a.detach()), b.detach(), **TOLERANCE)
    # Only rank 0 writes; the loss of a step is the mean over both ranks.
    dist.barrier()
    (run,) = runs.iterdir()
    assert (session.run is not None) == (rank == 0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["value"] for line in lines if line["name"] == "train/loss"]
    torch.testing.assert_close(losses, norms_alone.losses, **TOLERANCE)
    if clip:
        (mean,) = [line["value"] for line in lines if line["name"] == "train/loss_epoch"]
        torch.testing.assert_close(mean, sum(losses) / STEPS, **TOLERANCE)
    totals = [line["value"] for line in lines if line["name"] == "gradients/total/norm"]
    torch.testing.assert_close(totals, norms_alone.norms[1::2], **TOLERANCE)
    layers = {line["name"].split("/")[1] for line in lines if line["name"].startswith("gradients/")}
    assert layers == {"total", *(name for name, _ in alone.named_parameters())}, layers


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


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for kind in ("ddp", "fsdp"):
        for clip in (False, True):
            check_numbers(kind, folder, clip=clip)
        check_decisions(kind)
    check_names()
    check_errors()
    print(f"rank {dist.get_rank()} fine", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo threads sometimes abort the interpreter while it exits


if __name__ == "__main__":
    main()
