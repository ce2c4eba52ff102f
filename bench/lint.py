"""Lint in a bare loop: over a loop without it in a thousand steps, and what it takes at the start.

A language model whose step takes about 10 ms. The loop with Lint and the loop without run in two
processes that take turns, a few steps each, so that both meet a machine that is fast or slow: Lint
replaces functions of torch for its whole process. The steps from the beginning are in the total,
with `attach`, the active checks and all steps that are looked at closely; imports are not. Time of
the process is measured beside time on the clock, since it tells more on a machine that does other
things meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from multiprocessing import get_context
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline
from bench.harness import Row, Spread

__all__ = ["run"]

STEPS = 1000
LIMIT = 1.02
LIMIT_OF_START = 1.0  # second
CLOSE = 10  # steps that are looked at closely, and in a turn
LATER = {16, 24, 32, 48, 64, *range(100, STEPS + 1, 100)}  # others that are
CLOCKS = ("time of the process", "on the clock")
SMALL = {"width": 64, "layers": 2, "vocabulary": 256}
LARGE = {"width": 320, "layers": 6, "vocabulary": 4000}

Turns = list[tuple[float, float]]
"""The seconds of each turn, by both clocks."""


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
    steps = [_take_turns(SMALL, 16, STEPS // CLOSE) for _ in range(rounds)]
    start = [_take_turns(LARGE, 2, 1) for _ in range(2 * rounds)]
    millions = sum(p.numel() for p in LanguageModel(**LARGE).parameters()) / 1e6
    rows: list[Row] = []
    for clock, name in enumerate(CLOCKS):
        totals = [_total(bare, linted, clock) for bare, linted in steps]
        firsts = [linted[0][clock] - bare[0][clock] for bare, linted in start]
        step = median(total for total, _ in totals) / STEPS
        without = median(bare[0][clock] for bare, _ in start)
        rows += [
            Row(
                f"Lint, {STEPS} steps, over the bare loop, {name}",
                Spread.of([1 + more / total for total, more in totals]),
                "×",
                limit=LIMIT,
                note=f"a step of {step * 1e3:.1f} ms",
            ),
            Row(
                f"Lint, the first {CLOSE} steps of {millions:.0f} M parameters, {name}",
                Spread.of(firsts),
                "s",
                limit=LIMIT_OF_START,
                note=f"these steps take {without:.2f} s without it",
            ),
        ]
    return rows


def _total(bare: Turns, linted: Turns, clock: int) -> tuple[float, float]:
    """Return the seconds of the bare loop, and by how much the other one takes longer.

    Turns without a step that is looked at closely are alike, so they count with their median: what
    the machine does in between hits a turn of one loop, and not the same one of the other.
    """
    plain = [i for i in range(len(bare)) if not _is_close(i)]
    usual = median(bare[i][clock] for i in range(len(bare)))
    between = median(linted[i][clock] - bare[i][clock] for i in plain)
    close = sum(linted[i][clock] - usual for i in range(len(bare)) if i not in plain)
    return usual * len(bare), between * len(plain) + close


def _is_close(turn: int) -> bool:
    steps = range(turn * CLOSE + 1, (turn + 1) * CLOSE + 1)
    return turn == 0 or not LATER.isdisjoint(steps)


def _take_turns(model: dict[str, int], batch: int, turns: int) -> tuple[Turns, Turns]:
    """Return the times of the turns of a bare loop, and of one with Lint."""
    context = get_context("spawn")
    ends: list[Any] = []
    processes = []
    for linted in (False, True):
        own, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, model, batch, linted), daemon=True)
        process.start()
        processes.append(process)
        ends.append(own)
    for end in ends:
        end.recv()
    times: tuple[Turns, Turns] = ([], [])
    for turn in range(turns):
        for i in (0, 1) if turn % 2 else (1, 0):
            ends[i].send(turn)
            times[i].append(ends[i].recv())
    for end, process in zip(ends, processes, strict=True):
        end.send(None)
        process.join()
    return times


def _serve(end: Any, model: dict[str, int], batch: int, linted: bool) -> None:
    """Train in a process of its own, some steps for each message."""
    torch.set_num_threads(1)
    logging.getLogger("hookline").setLevel(logging.ERROR)
    warm = _Loop({"width": 8, "layers": 1, "vocabulary": 8}, 4)
    warm.train(linted=True)
    _end(warm)
    loop = _Loop(model, batch)
    end.send("ready")
    while end.recv() is not None:
        begin = process_time(), perf_counter()
        loop.train(linted=linted)
        end.send((process_time() - begin[0], perf_counter() - begin[1]))
    _end(loop)


class _Loop:
    def __init__(self, model: dict[str, int], batch: int) -> None:
        torch.manual_seed(0)
        self.model: Any = LanguageModel(**model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data: Sequence[Tensor] = [
            torch.randint(0, model["vocabulary"], (batch, 32)) for _ in range(20)
        ]
        self.session: Any = None
        self.steps = 0

    def train(self, *, linted: bool) -> None:
        """Make some steps; the first ones include attaching Lint."""
        if linted and self.session is None:
            hooks = [hookline.Lint()]
            self.session = hookline.attach(self.model, self.optimizer, hooks=hooks)
        for _ in range(CLOSE):
            ids = self.data[self.steps % len(self.data)]
            self.steps += 1
            self.optimizer.zero_grad()
            logits = self.model(ids)[:, :-1].flatten(0, 1)
            F.cross_entropy(logits, ids[:, 1:].flatten()).backward()
            self.optimizer.step()


def _end(loop: _Loop) -> None:
    if loop.session is not None:
        loop.session.detach()
