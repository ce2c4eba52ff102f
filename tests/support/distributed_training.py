"""Trainings in two processes, started by `test_strategies.py` with torchrun.

Each function is one training or several; what they return in each rank is written as JSON.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hookline
from hookline import ModelCheckpoint, Trainer, TrainerConfig

RANK = int(os.environ.get("RANK", "0"))


class Watch(hookline.Hook):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[str] = []
        self.saved: list[str] = []
        self.validated: list[float] = []

    def on_step_end(self, loss: float, grad_norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(grad_norm)

    def on_step_skipped(self, reason: str) -> None:
        self.skipped.append(reason)

    def on_checkpoint_save(self, path: str) -> None:
        self.saved.append(Path(path).name)

    def on_validation_end(self, metrics: Any) -> None:
        self.validated.append(metrics["val/loss"])


class OnMain(hookline.Hook):
    """Counts the steps, in rank 0 only."""

    ranks = "main"

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self) -> None:
        self.steps += 1


class Once(hookline.Hook):
    """Calls a function in one rank after one step."""

    intervenes = True

    def __init__(self, rank: int, step: int, function: Any, event: str = "end") -> None:
        self._due = (rank, step, event)
        self._function = function

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        self._call("end", trainer, step)

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        self._call("before", trainer, step)

    def _call(self, event: str, trainer: Trainer, step: int) -> None:
        if (RANK, step, event) == self._due:
            self._due = None
            self._function(trainer)


class Numbers(IterableDataset[Any]):
    """As many samples as it is told."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        for _ in range(self._n):
            yield torch.randn(8, generator=generator), torch.randn(4, generator=generator)


def make(folder: Path | None, *, dropout: float = 0.0, **fields: Any) -> tuple[Trainer, Watch]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"max_epochs": 2, "seed": 3, "clip_norm": 0.5, "progress": "off", "runs": folder}
    config = TrainerConfig(**(settings | fields))
    watch = Watch()
    trainer = Trainer(config, model, optimizer, loss_fn=nn.functional.mse_loss, hooks=[watch])
    return trainer, watch


def loaders(samples: int = 90) -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(samples, 8, generator=generator),
        torch.randn(samples, 4, generator=generator),
    )
    train = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
    return train, DataLoader(TensorDataset(x[:33], y[:33]), batch_size=5)


def weights(trainer: Trainer) -> dict[str, Any]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        for name, value in trainer.model.state_dict().items()
    }


def describe(trainer: Trainer, watch: Watch) -> dict[str, Any]:
    return {
        **vars(watch),
        "weights": weights(trainer),
        "status": trainer.status,
        "reason": trainer.stop_reason,
        "steps": trainer.step,
        "hooks": {info.name: info.status for info in trainer.hooks.describe()},
    }


def train(folder: Path | None, **fields: Any) -> dict[str, Any]:
    trainer, watch = make(folder, **fields)
    on_main = OnMain()
    trainer.add_hook(on_main)
    run: list[Any] = []
    trainer.add_hook(Once(RANK, 1, lambda trainer: run.append(trainer.run)))
    train_loader, val_loader = loaders()
    trainer.fit(train_loader, val_loader)
    ran = run[0] and [run[0].id, str(run[0].path)]
    return {**describe(trainer, watch), "on_main": on_main.steps, "run": ran}


def decide(folder: Path) -> dict[str, Any]:
    """Requests of one rank, which all ranks follow."""
    requests = {
        "stop": Once(1, 5, lambda trainer: trainer.stop("rank 1 asked")),
        "skip": Once(1, 5, lambda trainer: trainer.skip_optimizer_step(None, "asked"), "before"),
        "save": Once(1, 5, lambda trainer: trainer.save_checkpoint(folder / "mine")),
        "toggle": Once(1, 5, lambda trainer: trainer.disable_hook("on_main")),
    }
    results: dict[str, Any] = {}
    for name, hook in requests.items():
        trainer, watch = make(folder / name, max_epochs=1)
        on_main = OnMain()
        trainer.add_hook(on_main, "on_main")
        trainer.add_hook(hook)
        trainer.fit(loaders()[0])
        results[name] = {**describe(trainer, watch), "on_main": on_main.steps}
    return results


def fail_hooks(folder: Path) -> dict[str, Any]:
    """A hook that fails in one rank is disabled in all, and nobody waits."""

    class Failing(hookline.Hook):
        def on_step_end(self) -> None:
            if RANK == 1:
                raise ValueError("only in rank 1")

    trainer, watch = make(None, max_epochs=1)
    trainer.add_hook(Failing(), "failing")
    trainer.fit(loaders()[0])
    return describe(trainer, watch)


def resume(folder: Path, **fields: Any) -> dict[str, Any]:
    """A run that is interrupted and resumed, beside one that is not."""
    results: dict[str, Any] = {}
    for name, limits in {"whole": [16], "parts": [7, 16]}.items():
        for limit in limits:
            trainer, watch = make(folder / name, dropout=0.3, max_steps=limit, **fields)
            trainer.add_hook(ModelCheckpoint(every_n_steps=7))
            trainer.add_hook(hookline.EMA(decay=0.9))
            train_loader, val_loader = loaders()
            found = sorted((folder / name).glob("2*")) if len(limits) > 1 and limit == 16 else []
            trainer.fit(train_loader, val_loader, resume_from=found[0] if found else None)
        results[name] = {**describe(trainer, watch), "random": torch.get_rng_state().tolist()}
    return results


def end_together(folder: Path) -> dict[str, Any]:
    """Loaders that have different numbers of batches in the processes."""
    results: dict[str, Any] = {}
    batch = loaders()[0].dataset[:4]
    sources: dict[str, Any] = {
        "known": [batch] * (7 + RANK),
        "streamed": DataLoader(Numbers(11 + 6 * RANK), batch_size=2),
    }
    for name, data in sources.items():
        trainer, watch = make(None, max_epochs=2, shard_loaders=False)
        trainer.fit(data, [batch] * (1 + 2 * RANK))
        results[name] = describe(trainer, watch)
    return results


def fail_part(folder: Path, **fields: Any) -> dict[str, Any]:
    """The second save fails in rank 1; training goes on, and the first checkpoint stays."""
    from hookline.checkpoint.saver import ShardWriter

    write_file, saves = ShardWriter._write_file, []

    def fail(self: ShardWriter, file: Path, data: memoryview) -> str:
        saves.append(self._shared.token)
        if len(set(saves)) == 2 and file.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_file(self, file, data)

    ShardWriter._write_file = fail  # type: ignore[method-assign]
    trainer, watch = make(folder, max_steps=9, **fields)
    trainer.add_hook(ModelCheckpoint(every_n_steps=4, save_top_k=-1, monitor=None))
    trainer.fit(loaders()[0])
    ShardWriter._write_file = write_file  # type: ignore[method-assign]
    return describe(trainer, watch)


def main() -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # all ranks may wait for each other for ever
    folder, *names = sys.argv[1:]
    for name in names:
        function, _, argument = name.partition(":")
        fields = json.loads(argument) if argument else {}
        out = Path(folder) / function
        result = globals()[function](out, **fields)
        file = Path(folder) / f"{function}-{RANK}.json"
        file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
