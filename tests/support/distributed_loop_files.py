"""Run by `torchrun` with two ranks: validation and checkpoints of bare loops under DDP and FSDP2.

Usage: distributed_loop_files.py FOLDER. The folder has a checkpoint `alone`, of one process, and
gets checkpoints of two.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_loops import Model, recorded
from rank_checks import check_in_all_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import hookline
from hookline.loop import rank_sync as loop_agreement
from hookline.tensors.sharded import whole


class Saved(hookline.Hook):
    """Records the events of checkpoints and validations, on every rank."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, str]] = []
        self.loaded: list[int] = []

    def on_checkpoint_save(self, checkpoint_path: Any, step: int) -> None:
        self.saved.append((step, Path(checkpoint_path).name))

    def on_checkpoint_load(self, step: int) -> None:
        self.loaded.append(step)


class Validated(hookline.Hook):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        self.values.append({name: float(value) for name, value in metrics.items()})


class Noisy(nn.Module):
    """A model that draws random numbers, other ones in each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.drop = Model(), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.drop(x))


def make_noisy(kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(Noisy())
    return fully_shard(Noisy())


def train(
    model: nn.Module, optimizer: Any, session: Any, start: int, end: int, **saves: Any
) -> None:
    for step in range(start, end):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if saves.get("at") == step + 1:
            with torch.no_grad():  # FSDP2 has whole parameters after it
                model(batch)
            session.save_checkpoint(saves["path"], extra={"at": step}, wait=saves["wait"])


def begin(kind: str, **options: Any) -> tuple[Any, Any, Any]:
    model = make_noisy(kind)  # the same in both ranks
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, hookline.attach(model, optimizer, **options)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    state = getattr(model, "module", model).state_dict()
    return {name: whole(value).clone() for name, value in state.items()}


def check_resume(kind: str, folder: Path, *, wait: bool) -> None:
    """A resumed loop has the bits of one that was not interrupted, dropout included."""
    path = folder / f"{kind}_{wait}"
    saved = Saved()
    model, optimizer, session = begin(kind, hooks=[saved, hookline.EMA()])
    with session:
        train(model, optimizer, session, 0, 6, at=3, path=path, wait=wait)
    assert saved.saved == [(3, path.name)]  # in both ranks
    again, other_optimizer, session = begin(kind, hooks=[saved, hookline.EMA()])
    start = session.load_checkpoint(path)
    assert (start.step, start.extra) == (3, {"at": 2})
    with session:
        train(again, other_optimizer, session, 3, 6)
    assert saved.loaded == [3]
    for name, value in weights(model).items():
        assert torch.equal(weights(again)[name], value), name
    left = [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]
    dist.barrier()
    assert not left, left
    dist.barrier()


def check_other_numbers_of_ranks(folder: Path) -> None:
    """Let two processes load what one has saved, and the other way round (see the test)."""
    model, _, session = begin("fsdp")
    start = session.load_checkpoint(folder / "alone")
    session.detach()
    assert start.step == 2
    expected = torch.load(folder / "alone.pt")
    for name, value in weights(model).items():
        assert torch.equal(value, expected[name]), name
    model, optimizer, session = begin("fsdp")
    with session, session.epoch():
        session.log("seen", float(dist.get_rank()))
        train(model, optimizer, session, 0, 2, at=2, path=folder / "two", wait=True)
    final = weights(model)
    if dist.get_rank() == 0:
        torch.save(final, folder / "two.pt")
    dist.barrier()


def check_hooks(kind: str, folder: Path) -> None:
    """Save from a hook of rank 0: all ranks save, and all are told."""
    saved = Saved()
    checkpoints = hookline.ModelCheckpoint(-1, every_n_steps=2, filename="at_{step}")
    hooks = [saved, checkpoints, AtEnd()]
    model, optimizer, session = begin(kind, hooks=hooks, runs=folder / f"runs_{kind}")
    with session:
        train(model, optimizer, session, 0, 5)
    names = [name for _, name in saved.saved]
    expected = ["at_step=2", "at_step=4", "at_end"]
    assert names == expected, names
    dist.barrier()
    (run,) = (folder / f"runs_{kind}").iterdir()
    for name in expected:
        assert hookline.checkpoint.load_checkpoint(run / "checkpoints" / name).info["step"]
        check_random_states(run / "checkpoints" / name)
    assert not [entry.name for entry in (run / "checkpoints").iterdir() if entry.name[0] == "."]
    again, optimizer, session = begin(kind)
    session.load_checkpoint(run / "checkpoints" / "at_step=2")
    with session:
        train(again, optimizer, session, 2, 5)
    for name, value in weights(model).items():
        assert torch.equal(weights(again)[name], value), name


def check_random_states(path: Path) -> None:
    """The checkpoint has the random state of each rank."""
    first, second = hookline.checkpoint.load_checkpoint(path).state["ranks"]
    assert not torch.equal(first["random"]["torch"], second["random"]["torch"])


def check_save_in_rank_0(folder: Path) -> None:
    """A loop that saves in rank 0 only goes on, with a warning; the others keep their states."""
    rank, path = dist.get_rank(), folder / "rank_0"
    model, optimizer, session = begin("ddp")
    with session, short_limits(), warnings() as lines:
        for step in range(3):
            train(model, optimizer, session, step, step + 1)
            if rank == 0:
                session.save_checkpoint(path / str(step), wait=True)
    assert sum("Rank 1 has not called session.save_checkpoint" in line for line in lines) == (
        rank == 0
    )
    dist.barrier()
    assert "ranks" not in hookline.checkpoint.load_checkpoint(path / "2").state
    _, _, session = begin("ddp")
    before = torch.get_rng_state()
    assert session.load_checkpoint(path / "2").step == 3
    assert torch.equal(torch.get_rng_state(), before) == (rank == 1)


class AtEnd(hookline.Hook):
    """Saves when training ends, in rank 0."""

    ranks = "main"

    def on_train_end(self, trainer: Any) -> None:
        trainer.save_checkpoint(Path(trainer.run.checkpoints) / "at_end", wait=True)


def check_logged(kind: str, folder: Path) -> None:
    """Log in the loop: it is recorded as the mean over both ranks, also what one of them logs.

    A resumed run has every step once. Under DDP rank 0 saves alone here, so that the steps that
    were not averaged yet are its own.
    """
    runs, rank = folder / f"logged_{kind}", dist.get_rank()
    for end in (3, 5):
        model, optimizer, session = begin(kind, runs=runs)
        start = session.load_checkpoint()
        try:
            with session, short_limits() if kind == "ddp" else nullcontext():
                for step in range(start.step if start else 0, end):
                    session.log("rank", rank)
                    if rank == 0:
                        session.log("own", torch.tensor(7.0))
                    train(model, optimizer, session, step, step + 1)
                    if step == 1 and (kind == "fsdp" or rank == 0):
                        session.save_checkpoint(wait=True)
                if end == 3:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        dist.barrier()
    found = recorded(runs)
    alone = [] if kind == "fsdp" else [0.0, 0.0]
    assert found["train/rank"] == alone + [0.5] * (5 - len(alone)), found["train/rank"]
    assert found["train/own"] == [7.0] * 5
    assert len(found["train/loss"]) == 5


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect what this rank logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hookline").addHandler(handler)
    yield lines
    logging.getLogger("hookline").removeHandler(handler)


@contextmanager
def short_limits() -> Iterator[None]:
    names = ("_CALL_SECONDS", "_VALIDATION_SECONDS", "_SECONDS")
    limits = {name: getattr(loop_agreement, name) for name in names}
    for name in names:
        setattr(loop_agreement, name, 1.0)
    yield
    for name, limit in limits.items():
        setattr(loop_agreement, name, limit)


def check_one_rank_alone(folder: Path) -> None:
    """A rank that saves or loads alone gets an error that names the others."""
    model, optimizer, session = begin("fsdp")
    with session, short_limits():
        train(model, optimizer, session, 0, 1)
        if dist.get_rank() == 1:
            with pytest.raises(hookline.LoopError, match=r"Rank 0 .* session.save_checkpoint"):
                session.save_checkpoint(folder / "never")
        dist.barrier()
    _, _, session = begin("fsdp")
    with short_limits():
        if dist.get_rank() == 0:
            with pytest.raises(hookline.LoopError, match=r"Rank 1 .* session.load_checkpoint"):
                session.load_checkpoint(folder / "alone")
        dist.barrier()
    assert not (folder / "never").exists()


def check_uneven_end() -> None:
    """A rank that ends its session while the others do not goes on after the time limit."""
    model, optimizer, session = begin("ddp")
    session.begin()
    train(model, optimizer, session, 0, 1)
    if dist.get_rank() == 1:
        with short_limits():
            session.detach()
    dist.barrier()
    if dist.get_rank() == 0:
        with short_limits():
            session.detach()
    assert session.status == "completed"


SIZES = ([4, 4, 2], [3])  # of the validation batches of each rank


def check_validation(kind: str, folder: Path) -> None:
    """`val/…` is the mean over the samples of all ranks, which have unequally many batches."""
    rank, seen = dist.get_rank(), Validated()
    runs = folder / f"validated_{kind}"
    stopping = hookline.EarlyStopping("val/loss", patience=1)
    model, optimizer, session = begin(kind, hooks=[seen, stopping], runs=runs)
    steps = 0
    with session:
        for _ in range(5):
            with session.epoch():
                train(model, optimizer, session, steps, steps + 1)
                steps += 1
                with session.validation():
                    for i, batch in enumerate(session.batches(map(torch.ones, SIZES[rank]))):
                        session.log("loss", batch.sum() / len(batch) + rank * 10.0 + i)
                    if rank == 1:
                        session.log("own", 3.0)
            if session.should_stop:
                break
    assert session.status == "stopped"
    assert steps == 2  # of the same validation, in both ranks
    values = [(1.0 + 10.0 * r + i, n) for r in (0, 1) for i, n in enumerate(SIZES[r])]
    mean = sum(value * n for value, n in values) / sum(n for _, n in values)
    for found in seen.values:
        torch.testing.assert_close(found, {"val/loss": mean, "val/own": 3.0})
    dist.barrier()
    assert recorded(runs)["val/loss"] == [pytest.approx(mean)] * 2


def check_validation_in_rank_0(kind: str, folder: Path) -> None:
    """A loop that validates in rank 0 only goes on, with a warning."""
    rank, seen = dist.get_rank(), Validated()
    model, optimizer, session = begin(kind, hooks=[seen])
    with session, short_limits(), warnings() as lines:
        for step in range(3):
            train(model, optimizer, session, step, step + 1)
            if rank == 0:
                with session.validation():
                    session.log("loss", step)
    assert session.step == 3
    assert seen.values == ([{"val/loss": float(step)} for step in range(3)] if rank == 0 else [])
    assert sum("Rank 1 has not begun a validation" in line for line in lines) == (rank == 0)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    check_in_all_ranks(
        *(partial(check_validation, kind, folder) for kind in ("ddp", "fsdp")),
        *(partial(check_validation_in_rank_0, kind, folder) for kind in ("ddp", "fsdp")),
        *(partial(check_resume, k, folder, wait=w) for k in ("ddp", "fsdp") for w in (True, False)),
        partial(check_save_in_rank_0, folder),
        partial(check_other_numbers_of_ranks, folder),
        *(partial(check_hooks, kind, folder) for kind in ("ddp", "fsdp")),
        *(partial(check_logged, kind, folder) for kind in ("ddp", "fsdp")),
        partial(check_one_rank_alone, folder),
        check_uneven_end,
    )
