"""Lint in a bare loop: over a loop without it in a thousand steps, and what it takes at the start.

A language model whose step takes about 10 ms. Each round trains both, from the beginning: the first
ten steps, with the active checks, cost most. Time of the process is measured beside time on the
clock, since it tells more on a machine that does other things meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline
from bench.harness import Row, interleave

__all__ = ["run"]

STEPS = 1000
LIMIT = 1.02
LIMIT_OF_START = 1.0  # second
CLOSE = 10  # steps that are looked at closely


class LanguageModel(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.blocks(self.embed(ids), mask=mask, is_causal=True))


def run(*, quick: bool) -> list[Row]:
    rounds = 3 if quick else 20
    small = partial(LanguageModel, width=64, layers=2, vocabulary=256)
    large = partial(LanguageModel, width=320, layers=6, vocabulary=4000)
    rows: list[Row] = []
    for clock, name in ((process_time, "time of the process"), (perf_counter, "on the clock")):
        steps = interleave(
            {
                "bare": partial(_timed, clock, small, STEPS, batch=12, linted=False),
                "lint": partial(_timed, clock, small, STEPS, batch=12, linted=True),
            },
            rounds=rounds,
            warmup=1,
        )
        start = interleave(
            {
                "bare": partial(_timed, clock, large, CLOSE, batch=2, linted=False),
                "lint": partial(_timed, clock, large, CLOSE, batch=2, linted=True),
            },
            rounds=2 * rounds,
            warmup=1,
        )
        millions = sum(p.numel() for p in large().parameters()) / 1e6
        rows += [
            Row(
                f"Lint, {STEPS} steps, over the bare loop, {name}",
                steps.ratio("lint", "bare"),
                "×",
                limit=LIMIT,
                note=f"a step of {steps.time('bare') * 1e3:.1f} ms",
            ),
            Row(
                f"Lint, the first {CLOSE} steps of {millions:.0f} M parameters, {name}",
                start.excess("lint", "bare").scaled(CLOSE),
                "s",
                limit=LIMIT_OF_START,
                note=f"these steps take {start.time('bare') * CLOSE:.2f} s without it",
            ),
        ]
    return rows


def _timed(
    clock: Callable[[], float],
    make: Callable[[], nn.Module],
    steps: int,
    *,
    batch: int,
    linted: bool,
) -> float:
    """Return the seconds per step of a loop, with what `attach` takes."""
    torch.manual_seed(0)
    model: Any = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    vocabulary = model.head.out_features
    data = [torch.randint(0, vocabulary, (batch, 32)) for _ in range(20)]
    begin = clock()
    session = hookline.attach(model, optimizer, hooks=[hookline.Lint()]) if linted else None
    for step in range(steps):
        ids = data[step % len(data)]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    if session is not None:
        session.detach()
    return (clock() - begin) / steps
