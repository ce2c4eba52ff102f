"""A training run with all that a checkpoint has to restore, for tests that kill its process.

Dropout, BatchNorm, two shuffled loaders, one of them with workers, gradient accumulation, EMA,
early stopping, a scheduler, updates with state, the best checkpoints by a metric, and saves every
few steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hookline
from hookline import Trainer, TrainerConfig
from hookline.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from hookline.errors import CheckpointError

STARTING, STEP, VALIDATION, ENDING, DONE = range(5)


class Progress(hookline.Hook):
    """Tells where training stands, and counts steps in a state of its own.

    Args:
        tell: gets STARTING, STEP, VALIDATION or ENDING.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self.steps = 0
        self.losses = 0.0

    def on_train_start(self) -> None:
        """Training starts or continues."""
        self._tell(STARTING)

    def on_train_batch_start(self) -> None:
        """A batch was loaded."""
        self._tell(STEP)

    def on_step_end(self, loss: float) -> None:
        """Count, and add up what a doubled or missing step would change."""
        self.steps += 1
        self.losses += loss

    def on_validation_start(self) -> None:
        """Validation starts."""
        self._tell(VALIDATION)

    def on_validation_end(self) -> None:
        """Validation ended."""
        self._tell(STEP)

    def on_train_end(self) -> None:
        """Training ends."""
        self._tell(ENDING)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"steps": self.steps, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        self.steps, self.losses = state["steps"], state["losses"]


class Net(nn.Module):
    """A small classifier with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random samples of four classes.

    Args:
        size: their number.
        seed: decides them.
        augment: add random numbers to a sample, which depend on its index.
    """

    def __init__(self, size: int, seed: int, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = (self.x[:, :4] + torch.randn(size, 4, generator=generator)).argmax(1)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.augment:  # also in workers, whose own random numbers are not restored
            x = x + 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, self.y[index]


def make_loaders() -> tuple[dict[str, DataLoader[Any]], DataLoader[Any]]:
    """Return two train loaders and a validation loader."""
    loaders = {
        "workers": DataLoader(
            Samples(20, 1, augment=True),
            batch_size=4,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
        ),
        "no workers": DataLoader(Samples(18, 2), batch_size=6, shuffle=True),
    }
    return loaders, DataLoader(Samples(24, 3), batch_size=4)


def make_trainer(
    runs: Path, *hooks: hookline.Hook, stops_at: float | None = None, **fields: Any
) -> Trainer:
    """Return the trainer.

    Args:
        runs: the folder of its runs.
        hooks: further hooks.
        stops_at: the validation loss at which training stops.
        fields: fields of the configuration.
    """
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 14)
    config: dict[str, Any] = {
        "max_epochs": 6,
        "seed": 5,
        "accumulate": 2,
        "clip_norm": 1.0,
        "validate_every_steps": 4,
        "loaders": {"order": "round_robin", "length": "longest"},
        "runs": runs,
        "progress": "off",
    }
    trainer = Trainer(
        TrainerConfig(**config | fields),
        model,
        optimizer,
        scheduler,
        loss_fn=nn.functional.cross_entropy,
        hooks=[
            *hooks,
            hookline.EMA(decay=0.9, every_n_steps=1),
            hookline.EarlyStopping(monitor="val/loss", patience=2, stopping_threshold=stops_at),
            hookline.LRMonitor(),
            hookline.ModelCheckpoint(save_top_k=2, monitor="val/loss", save_last=True),
            hookline.ModelCheckpoint(save_top_k=2, every_n_steps=2, filename="{step}"),
            hookline.CheckpointHook(keep=2),
        ],
    )
    trainer.add_hook(hookline.Noise(eta=0.001, seed=3))
    trainer.add_hook(hookline.EMAFilter(alpha=0.9, strength=0.5))
    return trainer


def find_resumable(runs: Path) -> Path | None:
    """Return the newest complete checkpoint of the newest run that has one."""
    for run in sorted(runs.glob("*"), reverse=True):
        try:
            return find_checkpoint(run, verify=True)
        except CheckpointError:
            continue
    return None


def train(
    folder: Path,
    *hooks: hookline.Hook,
    tell: Callable[[int], None] = lambda _: None,
    resume_from: str | None = None,
    **fields: Any,
) -> Trainer:
    """Continue the run in a folder, or start one; when it ends write its state beside it.

    Args:
        folder: for the run, and its state at the end.
        hooks: further hooks.
        tell: is told where training stands.
        resume_from: for `fit`; None: the run in the folder, also if its hooks are others.
        fields: fields of the configuration, and arguments of `make_trainer`.
    """
    trainer = make_trainer(folder / "runs", Progress(tell), *hooks, **fields)
    loaders, validation = make_loaders()
    if resume_from is None:
        resume_from = find_resumable(folder / "runs")
    trainer.fit(loaders, validation, resume_from=resume_from)
    if trainer.status in ("completed", "stopped"):
        save_checkpoint(
            folder / "final",
            model=trainer.model.state_dict(),
            state=trainer.state_dict(),
            info={"status": trainer.status},
        )
    tell(DONE)
    return trainer


def newest_run(folder: Path) -> Path:
    """Return the run that ended: earlier ones were killed before their first checkpoint."""
    return max((folder / "runs").iterdir())


def describe_end(folder: Path) -> dict[str, Any]:
    """Return everything that has to be equal after a run, by path; a value for each leaf."""
    final = load_checkpoint(folder / "final")
    run = hookline.open_run(newest_run(folder))
    described: dict[str, Any] = {"status": final.info["status"], "run/status": run.status}
    _describe("model", final.model, described)
    _describe("state", final.state, described)
    return described


def read_metrics(folder: Path) -> list[str]:
    """Return the records of the run that ended, without their times."""
    rows = hookline.open_run(newest_run(folder)).metrics()
    return [json.dumps({name: row[name] for name in row if name != "time"}) for row in rows]


_CONTAINERS = (dict, list, tuple, torch.Tensor)


def _describe(path: str, value: Any, described: dict[str, Any]) -> None:
    """Add the leaves of a state; checkpoints of a hook as their steps and scores.

    Their names and numbers tell which were saved twice.
    """
    if path.endswith("/checkpoints/number"):
        return
    if path.endswith(("/checkpoints/kept", "/checkpoints/latest")):
        value = sorted((one["step"], one["score"] or 0.0) for one in value)
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        described[path] = (str(value.dtype), tuple(value.shape), tuple(data))
    elif isinstance(value, dict):
        for name, item in value.items():
            _describe(f"{path}/{name}", item, described)
    elif isinstance(value, list | tuple) and any(isinstance(v, _CONTAINERS) for v in value):
        for number, item in enumerate(value):
            _describe(f"{path}/{number}", item, described)
    else:
        described[path] = repr(value)  # NaN is equal to NaN, and 1 differs from 1.0 and True


def compare_ends(folder: Path, other: Path) -> list[str]:
    """Return what differs between the ends of two runs, one line each."""
    one, two = describe_end(folder), describe_end(other)
    differences = [
        f"{path}: {str(one.get(path))[:120]} and {str(two.get(path))[:120]}"
        for path in sorted(one.keys() | two.keys())
        if one.get(path) != two.get(path)
    ]
    records = list(unified_diff(read_metrics(folder), read_metrics(other), lineterm="", n=0))
    return records + differences
