"""Measure the cost of the diagnostics, all of them at their default frequencies.

A training of the transformer with 6.3 million parameters takes turns with the same one without
hooks, for as many steps as the rarest report takes, so that each report has its share. A step has
two micro-batches, which the noise scale needs.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import hookline
from bench.harness import Row, Spread, interleave
from bench.monitors import DIAGNOSTICS, make_batch, make_model
from hookline.config.hook_items import make_hook

__all__ = ["run"]

_PERIOD = 200  # steps after which all have reported


def run(*, quick: bool) -> list[Row]:
    rounds = 1 if quick else 5
    with tempfile.TemporaryDirectory() as folder:
        return [_measure(Path(folder), rounds)]


def _measure(folder: Path, rounds: int) -> Row:
    batch = make_batch()
    trainers = {
        "with": _trainer(folder, [make_hook(name, {}) for name in DIAGNOSTICS]),
        "without": _trainer(folder, []),
    }
    parts = rounds * 10
    measured = interleave(
        {
            name: partial(_steps, trainer, batch, _PERIOD // 10)
            for name, trainer in trainers.items()
        },
        rounds=parts,
        warmup=0,
    )
    for trainer in trainers.values():
        trainer.finish()
    ratio = measured.ratio("with", "without")
    whole = sum(measured.seconds["with"]) / sum(measured.seconds["without"])
    return Row(
        "all diagnostics at their default frequencies, over the same training without",
        Spread(whole, ratio.low, ratio.high),
        "×",
        limit=1.05,
        note=f"a step without takes {measured.time('without') * 1e3:.0f} ms",
    )


def _trainer(folder: Path, hooks: list[hookline.Hook]) -> hookline.Trainer:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = hookline.TrainerConfig(runs=folder, progress="off", accumulate=2)
    return hookline.Trainer(config, model, optimizer, loss_fn=nn.functional.mse_loss, hooks=hooks)


def _steps(trainer: Any, batch: Any, steps: int) -> float:
    begin = perf_counter()
    for _ in range(2 * steps):
        trainer.training_step(batch, lazy=True)
    return (perf_counter() - begin) / steps
