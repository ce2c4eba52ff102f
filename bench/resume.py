"""The time to the first batch of a run that is resumed late in an epoch, over that of a new run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hookline
from bench.harness import Row, interleave
from hookline.config.trainer_config import MixConfig

__all__ = ["run"]

BATCHES, SAMPLES = 20_000, 8
ORDERS: Mapping[str, dict[str, Any]] = {
    "a shuffled loader": {},
    "two shuffled loaders by weights": {"order": "weighted", "weights": [2, 1]},
}


class FirstBatch(hookline.Hook):
    """Notes when the first batch is there, and saves a checkpoint after so many steps."""

    def __init__(self, save_after: int | None = None) -> None:
        self.save_after = save_after
        self.time: float | None = None

    def on_train_batch_start(self) -> None:
        self.time = self.time or perf_counter()

    def on_step_end(self, trainer: hookline.Trainer, step: int) -> None:
        if step == self.save_after:
            trainer.save_checkpoint()


def run(*, quick: bool) -> list[Row]:
    rows = []
    for name, mixing in ORDERS.items():
        with tempfile.TemporaryDirectory() as folder:
            saved = _train(mixing, Path(folder), FirstBatch(BATCHES), BATCHES + 1).run
            assert saved is not None
            resume = partial(_time_to_first_batch, mixing, BATCHES + 1)
            measured = interleave(
                {"resumed": partial(resume, saved.path), "new": partial(resume, None)},
                rounds=3 if quick else 10,
                warmup=1,
            )
        note = f"a new run needs {measured.time('new'):.2f} s until its first batch"
        measure = f"resume at batch {BATCHES:,} of {name}, over batch 0"
        rows.append(Row(measure, measured.excess("resumed", "new"), "s", limit=1.0, note=note))
    return rows


def _time_to_first_batch(mixing: dict[str, Any], steps: int, checkpoint: Path | None) -> float:
    hook = FirstBatch()
    begin = perf_counter()
    _train(mixing, None, hook, 1 if checkpoint is None else steps, checkpoint)
    assert hook.time is not None
    return hook.time - begin


def _train(
    mixing: dict[str, Any],
    runs: Path | None,
    hook: hookline.Hook,
    steps: int,
    checkpoint: Path | None = None,
) -> hookline.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    config = hookline.TrainerConfig(
        runs=runs, progress="off", seed=0, max_steps=steps, loaders=MixConfig(**mixing)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = hookline.Trainer(config, model, optimizer, loss_fn=mse_loss, hooks=[hook])
    size = 2 * BATCHES * SAMPLES
    data = TensorDataset(torch.zeros(size, 4), torch.zeros(size, 1))
    loaders = [DataLoader(data, SAMPLES, shuffle=True) for _ in range(2 if mixing else 1)]
    return trainer.fit(loaders, resume_from=checkpoint)
