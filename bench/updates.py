"""Measure the cost of updates: the identity on all parameters of a GPT-2 shape, over none."""

from __future__ import annotations

from functools import partial
from itertools import repeat
from time import process_time

import torch
from torch.nn.functional import mse_loss

import hookline
from bench.harness import Row, interleave
from bench.probe_monitor import GPT, LENGTH, SAMPLES, VOCABULARY

__all__ = ["run"]


def run(*, quick: bool) -> list[Row]:
    rounds, steps = (8, 3) if quick else (30, 5)
    trainers = {
        "none": _trainer(),
        "none again": _trainer(),
        "identity": _trainer(hookline.Identity()),
        "clip_norm": _trainer(hookline.ClipNorm(1.0)),
    }
    batch = _batch()
    measured = interleave(
        {name: partial(_timed, trainer, batch, steps) for name, trainer in trainers.items()},
        rounds=rounds,
        warmup=1,
    )
    for trainer in trainers.values():
        trainer.finish()
    again = measured.ratio("none again", "none").median
    return [
        Row(
            "identity on all parameters, over no update",
            measured.ratio("identity", "none"),
            "×",
            limit=1.01,
            note=f"a step takes {measured.time('none') * 1e3:.0f} ms; none over itself {again:.3f}",
        ),
        Row("    clip_norm, over no update", measured.ratio("clip_norm", "none"), "×"),
    ]


def _trainer(*updates: hookline.Hook) -> hookline.Trainer:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = hookline.TrainerConfig(runs=None, progress="off")
    trainer = hookline.Trainer(config, model, optimizer, loss_fn=mse_loss)
    trainer.remove_hook("identity")
    trainer.hooks.register_hooks(updates)
    return trainer


def _timed(trainer: hookline.Trainer, batch: object, steps: int) -> float:
    begin = process_time()
    for _ in repeat(None, steps):
        trainer.training_step(batch)
    return (process_time() - begin) / steps


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return ids, torch.randn(SAMPLES, LENGTH, VOCABULARY, generator=generator)
