"""Measure the cost of probes on a GPT-2 shape: 8 layers of width 256, a batch of 4 × 64.

Each candidate has a model of its own, with the same weights, and forwards the same batch. A
hand-written hook does what the probe does: a detached copy of each block's output into a list. The
peers capture the same outputs of the same model; what they add is measured over the bare forward.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import nn

from bench.harness import Candidate, Rounds, Row, Spread, interleave
from hookline.probes import Capture

__all__ = ["run"]

WIDTH, LAYERS, HEADS, SAMPLES, LENGTH, WORDS = 256, 8, 4, 4, 64, 1024
MEGABYTE = 2**20
LIMIT_MB = 64


def run(*, quick: bool) -> list[Row]:
    rounds, forwards = (15, 3) if quick else (80, 3)
    # Peers by single forwards: the shorter a round, the less the machine changes within it.
    return [*_capture(rounds, forwards), *_peers(rounds * forwards, 1), *_memory(quick=quick)]


# -- the model ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_drop = nn.Dropout(0.0)
        self.resid_drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.c_attn(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        y = self.attn_drop(y).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.resid_drop(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(LENGTH)))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer = Transformer()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer(tokens))


def _tokens() -> torch.Tensor:
    return torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


def _timed(work: Callable[[], Any], times: int) -> float:
    # The process's own time, of all its threads: a forward takes so long that others get a turn.
    begin = process_time()
    for _ in repeat(None, times):
        work()
    return (process_time() - begin) / times


# -- capture --------------------------------------------------------------------------------------


def _capture(rounds: int, forwards: int) -> list[Row]:
    measured = interleave(
        {name: partial(_timed, make(), forwards) for name, make in _WAYS.items()}, rounds=rounds
    )
    milli = {name: f"{measured.time(name) * 1e3:.2f} ms" for name in _WAYS}
    again = f"the bare forward over itself {measured.ratio('again', 'bare').median:.3f}"
    return [
        Row(
            "capture of 8 block outputs over a hand-written hook that does the same",
            measured.ratio("capture", "by hand"),
            "×",
            limit=1.05,
            note=f"{milli['capture']}, by hand {milli['by hand']}, bare {milli['bare']}; {again}",
        ),
        Row(
            "disabled probes on all modules over no probes",
            measured.ratio("disabled", "bare"),
            "×",
            limit=1.02,
            note=f"{milli['disabled']}, bare {milli['bare']}; {again}",
        ),
        _added("  added by capture of 8 block outputs", measured, "capture", "bare"),
        _added("  added by the hand-written hook", measured, "by hand", "bare"),
        _added("  added by capture of inputs and outputs of all modules", measured, "all", "bare"),
    ]


def _added(measure: str, measured: Rounds, name: str, bare: str) -> Row:
    return Row(measure, measured.excess(name, bare).scaled(1e6), "µs")


def _bare() -> Callable[[], Any]:
    return partial(GPT(), _tokens())


def _by_hand() -> Callable[[], Any]:
    model, tokens, kept = GPT(), _tokens(), list[Any]()

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append(output.detach().clone())

    for block in model.transformer.h:
        block.register_forward_hook(keep)

    def forward() -> None:
        kept.clear()
        model(tokens)

    return forward


def _probed(which: Any = "transformer.h.*", *, whole: bool = False) -> Callable[[], Any]:
    model, tokens = GPT(), _tokens()
    capture = Capture(which, input=whole, kwargs=whole)
    capture.attach(model)

    def forward() -> None:
        capture.clear()
        model(tokens)

    return forward


def _called(name: str, module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList)


def _disabled() -> Callable[[], Any]:
    model = GPT()
    Capture(_called).attach(model).disable()
    return partial(model, _tokens())


_WAYS: dict[str, Callable[[], Callable[[], Any]]] = {
    "bare": _bare,
    "again": _bare,
    "by hand": _by_hand,
    "capture": _probed,
    "disabled": _disabled,
    "all": partial(_probed, _called, whole=True),
}


# -- peers ----------------------------------------------------------------------------------------


def _peers(rounds: int, forwards: int) -> list[Row]:
    """Measure what capturing adds to a forward, in each library over its own bare forward."""
    makers = {"nnsight": ("nnsight", _nnsight), "TransformerLens": ("transformer_lens", _lens)}
    rows: list[Row] = []
    for name, (module, make) in makers.items():
        if importlib.util.find_spec(module) is None:
            print(f"{name} is skipped: {module} is not installed.")
            continue
        theirs_bare, theirs = make()
        candidates: dict[str, Candidate] = {
            "bare": partial(_timed, _bare(), forwards),
            "ours": partial(_timed, _probed(), forwards),
            "theirs bare": partial(_timed, theirs_bare, forwards),
            "theirs": partial(_timed, theirs, forwards),
        }
        measured = interleave(candidates, rounds=rounds)
        ours = measured.excess("ours", "bare").scaled(1e6)
        added = measured.excess("theirs", "theirs bare").scaled(1e6)
        rows.append(
            Row(
                f"time that capture of 8 block outputs adds, beside {name}",
                ours,
                "µs",
                limit=added.median,
                peers={name: f"{added.median:.0f} µs ({added.low:.0f}–{added.high:.0f})"},
                note=f"each over its own bare forward: {measured.time('bare') * 1e3:.1f} ms and "
                f"{measured.time('theirs bare') * 1e3:.1f} ms",
            )
        )
    return rows


def _nnsight() -> tuple[Callable[[], Any], Callable[[], Any]]:
    from nnsight import NNsight

    model, tokens = GPT(), _tokens()
    traced = NNsight(model)

    def forward() -> None:
        saved = list[Any]()
        with traced.trace(tokens):
            for block in traced.transformer.h:
                saved.append(block.output.detach().clone().save())

    forward()
    return _bare(), forward


def _lens() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """TransformerLens 4 takes models of Hugging Face only: a GPT-2 of this shape, never trained."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    with tempfile.TemporaryDirectory() as folder:  # a tokenizer has to be there, and in a folder
        GPT2Config(vocab_size=WORDS, **shape).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
        marks = {"unk_token": "0", "bos_token": "1", "eos_token": "1", "pad_token": "1"}
        PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder)
        theirs = GPT2LMHeadModel(GPT2Config.from_pretrained(folder)).eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = TransformerBridge.boot_transformers(
            folder, hf_model=theirs, tokenizer=tokenizer, device="cpu"
        )
    tokens, wanted = _tokens(), {f"blocks.{i}.hook_out" for i in range(LAYERS)}

    def forward() -> None:
        _, cache = model.run_with_cache(
            tokens, names_filter=wanted.__contains__, return_cache_object=False
        )
        assert len({name: kept.detach().clone() for name, kept in cache.items()}) == LAYERS

    forward()
    return partial(model, tokens), forward


# -- memory ---------------------------------------------------------------------------------------


class Passes(nn.Module):
    """Blocks that give tensors of a block's shape and compute nothing, to be done sooner."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Identity() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x


def _memory(*, quick: bool) -> list[Row]:
    """Steps of the model's shape under a limit: what is kept, and what the process holds."""
    steps = 2_000 if quick else 10_000
    model = Passes()
    capture = Capture("h.*", input=False, kwargs=False, memory_limit_mb=LIMIT_MB)
    capture.attach(model)
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    most, resident = 0, list[int]()
    for step in range(steps):
        model(x)
        most = max(most, capture.store.nbytes)
        if step >= steps // 10 and step % (steps // 20) == 0:
            gc.collect()
            resident.append(_resident())
    growth = (resident[-1] - resident[0]) / MEGABYTE
    return [
        Row(
            f"captured memory over {steps} steps under memory_limit_mb={LIMIT_MB}, at most",
            Spread.of([most / MEGABYTE]),
            "MB",
            limit=LIMIT_MB,
            note=f"{capture.counts}",
        ),
        Row(
            "  and what the process holds has grown by, from a tenth of them to the end",
            Spread.of([growth]),
            "MB",
            limit=8.0,
        ),
    ]


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
