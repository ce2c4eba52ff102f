"""Measure the cost of built-in hooks on a transformer of 96 tensors and 6.3 million parameters.

A gradient monitor's report is measured from when gradients are ready until its values are in the
run's record, and compared with the least that gives the same numbers (norms), and with the version
that everybody writes first (a full report). Then a whole training, with all built-ins but the
diagnostics, and without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import hookline
from bench.harness import Candidate, Rounds, Row, Spread, interleave
from hookline.config.hook_items import make_hook
from hookline.config.hook_names import BUILT_INS
from hookline.hooks.monitoring.gradient_monitor import GradientMonitor

__all__ = ["DIAGNOSTICS", "make_batch", "make_model", "run"]

DIAGNOSTICS = (
    "optimizer_monitor",
    "gradient_noise_scale",
    "attention_monitor",
    "outlier_monitor",
    "logit_monitor",
    "sharpness",
    "loss_spike_detector",
)
"""The hooks that `bench/diagnostics.py` measures, with another limit."""

PERCENTILES = [10.0, 50.0, 90.0]
BINS = 64
WIDTH, LAYERS, SAMPLES, LENGTH = 256, 8, 4, 64


def run(*, quick: bool) -> list[Row]:
    rounds = 8 if quick else 30
    with tempfile.TemporaryDirectory() as folder:
        return [*_reports(Path(folder), rounds), _training(Path(folder), quick=quick)]


# -- one report -----------------------------------------------------------------------------------


def _reports(folder: Path, rounds: int) -> Iterator[Row]:
    trainer = _trainer(folder, [])
    trainer.training_step(make_batch())  # the run has begun, and records
    model = trainer.model
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    full = GradientMonitor(1, log_histogram=True, percentiles=PERCENTILES)
    candidates: dict[str, Candidate] = {
        "foreach": partial(_timed, partial(_foreach, model), 5),
        "norms": partial(_timed, _report_of(GradientMonitor(1), trainer), 5),
        "naive": partial(_timed, partial(_naive, trainer), 1),
        "full": partial(_timed, _report_of(full, trainer), 1),
    }
    measured = interleave(candidates, rounds=rounds)
    trainer.finish()
    milli = {name: f"{measured.time(name) * 1e3:.2f} ms" for name in candidates}
    yield Row(
        "gradient monitor, norms, over one foreach norm with one transfer",
        measured.ratio("norms", "foreach"),
        "×",
        limit=1.3,
        note=f"{milli['norms']}, foreach {milli['foreach']}",
    )
    yield Row(
        "gradient monitor, full report, over the naive one per parameter",
        measured.ratio("full", "naive"),
        "×",
        limit=0.333,
        note=f"{milli['full']}, naive {milli['naive']}",
    )


def _report_of(monitor: GradientMonitor, trainer: Any) -> Callable[[], None]:
    monitor.on_train_start(trainer.model)

    def report() -> None:
        monitor.on_gradients_ready(0, 0, trainer.optimizers, trainer.model)
        monitor.on_step_end(trainer)

    return report


def _foreach(model: nn.Module) -> list[float]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms: list[float] = torch.stack(torch._foreach_norm(gradients)).tolist()
    return norms


def _naive(trainer: Any) -> None:
    shares = torch.tensor(PERCENTILES) / 100
    for name, parameter in trainer.model.named_parameters():
        grad = parameter.grad
        trainer.log(f"{name}/norm", grad.norm().item())
        trainer.log(f"{name}/mean", grad.mean().item())
        trainer.log(f"{name}/std", grad.std().item())
        trainer.log(f"{name}/abs_max", grad.abs().max().item())
        trainer.log(f"{name}/zeros", (grad == 0).float().mean().item())
        trainer.log(f"{name}/nonfinite", (~grad.isfinite()).sum().item())
        low, high = grad.min().item(), grad.max().item()
        counts = torch.histc(grad, BINS, low, high).tolist()
        edges = torch.linspace(low, high, BINS + 1).tolist()
        trainer.log(f"{name}/histogram", (counts, edges), kind="histogram")
        values = torch.quantile(grad.reshape(-1), shares)
        for percentile, value in zip(PERCENTILES, values, strict=True):
            trainer.log(f"{name}/p{percentile:g}", value.item())


def _timed(work: Callable[[], Any], times: int) -> float:
    begin = perf_counter()
    for _ in repeat(None, times):
        work()
    return (perf_counter() - begin) / times


# -- a whole training -----------------------------------------------------------------------------


def _training(folder: Path, *, quick: bool) -> Row:
    """Several trainings take turns, some steps each; a report's share is in the whole time."""
    rounds, steps = (10, 5) if quick else (20, 10)
    hooks = _all_built_ins(folder)
    trainers = {
        "with": _trainer(folder, hooks),
        "without": _trainer(folder, []),
        "again": _trainer(folder, []),
    }
    batch = make_batch()
    measured = interleave(
        {
            name: partial(_timed, partial(trainer.training_step, batch), steps)
            for name, trainer in trainers.items()
        },
        rounds=rounds,
        warmup=1,
    )
    for trainer in trainers.values():
        trainer.finish()
    again = _whole_ratio(measured, "again").median
    return Row(
        "all built-ins but diagnostics, at default frequencies, over the same training without",
        _whole_ratio(measured, "with"),
        "×",
        limit=1.03,
        note=f"{len(hooks)} hooks, a step without takes {measured.time('without') * 1e3:.0f} ms; "
        f"the training without over itself {again:.3f}",
    )


def _whole_ratio(measured: Rounds, name: str) -> Spread:
    """The ratio of the whole times, since a median would leave out what is rare."""
    rounds = measured.ratio(name, "without")
    whole = sum(measured.seconds[name]) / sum(measured.seconds["without"])
    return Spread(whole, rounds.low, rounds.high)


def _all_built_ins(folder: Path) -> list[hookline.Hook]:
    """Every built-in hook but the diagnostics; an address is one where nobody is."""
    needs: dict[str, dict[str, Any]] = {
        "notification": {"webhook_url": "http://127.0.0.1:9/"},
        "upload": {"destination": str(folder / "uploaded")},
        "time_limit": {"limit": 3600},
    }
    updates = {name for name, path in BUILT_INS.items() if ".updates." in path}
    names = [name for name in BUILT_INS if name not in updates and name not in DIAGNOSTICS]
    return [make_hook(name, needs.get(name, {})) for name in names]


# -- the model ------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    """A transformer of 96 tensors and 6.3 million parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def _trainer(folder: Path, hooks: list[hookline.Hook]) -> hookline.Trainer:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = hookline.TrainerConfig(runs=folder, progress="off")
    return hookline.Trainer(config, model, optimizer, loss_fn=nn.functional.mse_loss, hooks=hooks)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, y
