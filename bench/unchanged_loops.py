"""Loops of other shapes under `hookline.attach`: one hook that does nothing, over none.

Each loop is compared with itself. A hook asks for what makes the loop special, if it has to be
noticed: the batches of a `DataLoader`, the tokens that an `Embedding` gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

import hookline
from bench.data import Batches
from bench.harness import Row, interleave

__all__ = ["run"]

LIMIT = 1.15
WARMUP = 60


class Step(hookline.Hook):
    def on_step_end(self) -> None: ...


class AsksForBatch(hookline.Hook):
    def on_train_batch_start(self, batch_idx: int) -> None: ...

    def on_step_end(self) -> None: ...


class AsksForTokens(hookline.Hook):
    def on_step_end(self, tokens_seen: int) -> None: ...


Loop = tuple[Any, Any, Callable[[], None]]
"""Model and optimizer, as `attach` gets them, and what trains."""


def different_rates(batches: Batches) -> Loop:
    model = nn.Linear(8, 8)
    first, second = (torch.optim.SGD([p], lr=0.01) for p in model.parameters())

    def train() -> None:
        for i, (x, y) in enumerate(batches):
            mse_loss(model(x), y).backward()
            first.step()
            first.zero_grad()
            if i % 2:
                second.step()
                second.zero_grad()

    return model, [first, second], train


def named_models(batches: Batches) -> Loop:
    models = {"generator": nn.Linear(8, 8), "discriminator": nn.Linear(8, 1)}
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=0.01) for n, m in models.items()}
    generator, discriminator = models.values()
    of_generator, of_discriminator = optimizers.values()

    def train() -> None:
        for x, y in batches:
            of_discriminator.zero_grad()
            made = generator(x)
            (discriminator(made.detach()).mean() - discriminator(y).mean()).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            (-discriminator(made).mean()).backward()
            of_generator.step()

    return models, optimizers, train


class Stream(IterableDataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader(batches: Batches) -> Loop:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for x, y in DataLoader(Stream(batches), batch_size=None):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()

    return model, optimizer, train


def embedding(batches: Batches) -> Loop:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.arange(8).reshape(2, 4)

    def train() -> None:
        for _ in batches:
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()

    return model, optimizer, train


LOOPS: dict[str, tuple[Callable[[Batches], Loop], type[hookline.Hook]]] = {
    "optimizers at different rates": (different_rates, Step),
    "named models and optimizers": (named_models, Step),
    "batches of a DataLoader that are noticed": (loader, AsksForBatch),
    "tokens counted where an Embedding gets them": (embedding, AsksForTokens),
}


def run(*, quick: bool) -> list[Row]:
    steps, rounds = (200, 8) if quick else (400, 30)
    candidates = {
        (name, attached): partial(_timed, make, hook if attached else None, steps)
        for name, (make, hook) in LOOPS.items()
        for attached in (False, True)
    }
    measured = interleave({str(key): one for key, one in candidates.items()}, rounds=rounds)
    rows: list[Row] = []
    for name in LOOPS:
        bare, attached = str((name, False)), str((name, True))
        note = f"{measured.time(bare) * 1e6:.1f} µs, {measured.time(attached) * 1e6:.1f} attached"
        rows.append(Row(name, measured.ratio(attached, bare), "×", LIMIT, note=note))
    return rows


def _timed(make: Callable[[Batches], Loop], hook: type[hookline.Hook] | None, steps: int) -> float:
    torch.manual_seed(0)
    batches = Batches(steps, WARMUP)
    model, optimizer, train = make(batches)
    if hook is None:
        train()
    else:
        with hookline.attach(model, optimizer, hooks=[hook()]):
            train()
    return batches.seconds_per_step
