"""Measure what a monitor on all modules adds to a forward, beside hooks written by hand.

A model of GPT-2's shape with 8 layers, 256 wide, 112 modules, on 4 × 64 tokens; it trains, so
dropout is on. Hand-written hooks call `.mean().item()` and `.std().item()`; the monitor reports the
same numbers, its report included.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Candidate, Rounds, Row, Spread, interleave
from hookline.probes.monitor import METRICS, Monitor

__all__ = ["GPT", "run"]

LAYERS, WIDTH, HEADS, VOCABULARY, SAMPLES, LENGTH = 8, 256, 4, 1024, 4, 64
DROPOUT = 0.1


def run(*, quick: bool) -> list[Row]:
    rounds = 15 if quick else 60
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    timed = [name for name in METRICS if name.endswith("time_ms")]
    monitors = {
        "mean and std": Monitor("**", ["mean", "std"]),
        "the default": Monitor("**"),
        "times": Monitor("**", timed),
        "not due": Monitor("**", ["mean", "std"]),
    }
    candidates: dict[str, Candidate] = {"bare": partial(_forwards, _model(), ids, None)}
    by_hand = _model()
    for module in by_hand.modules():
        module.register_forward_hook(_by_hand)
    candidates["by hand"] = partial(_forwards, by_hand, ids, None)
    for name, monitor in monitors.items():
        model = _model()
        due = name != "not due"
        monitor.attach(model, every=1 if due else 10**9)
        candidates[name] = partial(_forwards, model, ids, monitor if due else None)
    measured = interleave(candidates, rounds=rounds)
    return [
        _row(measured, "mean and std", limit=1.0),
        _row(measured, "the default", limit=None),
        _row(measured, "times", limit=None),
        _row(measured, "not due", limit=None),
    ]


def _row(measured: Rounds, name: str, limit: float | None) -> Row:
    added, by_hand = measured.excess(name, "bare"), measured.excess("by hand", "bare")
    pairs = zip(
        measured.seconds[name],
        measured.seconds["by hand"],
        measured.seconds["bare"],
        strict=True,
    )
    return Row(
        f"monitor on all modules ({name}): added time over hand-written mean and std",
        Spread.of([(ours - bare) / (theirs - bare) for ours, theirs, bare in pairs]),
        "×",
        limit=limit,
        note=f"adds {added.median * 1e3:.2f} ms, by hand {by_hand.median * 1e3:.2f} ms, to a "
        f"forward of {measured.time('bare') * 1e3:.1f} ms",
    )


def _forwards(model: nn.Module, ids: Tensor, monitor: Monitor | None, times: int = 3) -> float:
    begin = process_time()  # nothing here waits, and other processes count less
    for _ in repeat(None, times):
        model(ids)
        if monitor is not None:
            monitor.report()
    return (process_time() - begin) / times


def _by_hand(module: nn.Module, args: Any, output: Any) -> None:
    output.mean().item(), output.std().item()


# -- the model ------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


class GPT(nn.Module):
    """Modules as in GPT-2: 13 in each block, 8 around them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.transformer(ids))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(DROPOUT)
        self.resid_dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        heads = (samples, length, HEADS, width // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(width, 2))
        scores = q @ k.transpose(-1, -2) / heads[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = self.attn_dropout(scores.masked_fill(later, -torch.inf).softmax(-1))
        mixed = (weights @ v).transpose(1, 2).reshape(x.shape)
        return self.resid_dropout(self.c_proj(mixed))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.GELU("tanh")
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))
