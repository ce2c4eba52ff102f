"""Run by `torchrun` with two ranks: diagnostics with DDP and FSDP2.

What rank 0 has logged is written by name of the training, for a comparison with one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_checks import check_in_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline.runs.jsonl_reader import read_records
from hookline.tensors.sharded import local

SAMPLES, BATCH_SIZE = 96, 8  # of all processes together
OUTLIER = 40  # the sample with a very large loss


def make_data(*, outlier: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    y = torch.randn(SAMPLES, 4, generator=generator)
    if outlier:
        y[OUTLIER] = 1000.0
    return TensorDataset(x, y)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 3), nn.Linear(3, 4))


def train(
    folder: Path, *hooks: hookline.Hook, lr: float = 0.01, outlier: bool = False, **fields: Any
) -> hookline.Trainer:
    """Train in all processes, with a batch size of 8 of all of them together."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    config = hookline.TrainerConfig(**{"max_steps": 6, "runs": folder, "progress": "off"} | fields)
    trainer = hookline.Trainer(config, model, optimizer, loss_fn=F.mse_loss, hooks=hooks)
    trainer.fit(DataLoader(make_data(outlier=outlier), batch_size=BATCH_SIZE // ranks))
    assert trainer.hooks.summary().failures == {}
    return trainer


def logged(trainer: Any, prefix: str) -> dict[str, float]:
    """Return the values that were logged under names with a prefix, by step and name."""
    records = read_records(trainer.run.path / "metrics.jsonl")
    return {
        f"{one['step']} {one['name']}": one["value"]
        for one in records
        if one["name"].startswith(prefix)
    }


def check_all() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    measured = {
        "optimizer": (hookline.OptimizerMonitor, {"strategy": "fsdp", "clip_norm": 0.5}),
        "sharpness": (hookline.Sharpness, {"strategy": "ddp"}),
        "sharpness, accumulated": (hookline.Sharpness, {"strategy": "ddp", "accumulate": 2}),
        "gradient_noise": (hookline.GradientNoiseScale, {"strategy": "ddp"}),
        "gradient_noise, accumulated": (
            hookline.GradientNoiseScale,
            {"strategy": "ddp", "accumulate": 2},
        ),
    }
    for name, (kind, fields) in measured.items():
        trainer = train(folder / name, kind(1), **fields)
        if dist.get_rank() == 0:
            found[name] = logged(trainer, name.partition(",")[0])
    for kind in (hookline.Sharpness, hookline.GradientNoiseScale):
        with pytest.raises(hookline.HookConfigError, match=rf"{kind.__name__}.*sharded \(FSDP2\)"):
            train(folder / "refused", kind(), strategy="fsdp")
    record_spike(folder / "spike", found)
    check_unequal_batches(folder / "unequal")
    check_bare_loops(folder / "bare")
    check_same_weights(folder / "same")
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


def estimate(model: nn.Module, batches: list[Any]) -> tuple[float, float, int]:
    """Return signal, variance and samples of a step, from the batches of all processes."""
    own = []
    for x, y in batches:
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        own.append((torch.cat([g.flatten() for g in gradients]).double(), len(x)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    every = [one for several in everyone for one in several]
    n = len(every)
    squares = sum((gradient / n).square().sum().item() for gradient, _ in every)
    of_all = torch.stack([gradient / n for gradient, _ in every]).sum(0).square().sum().item()
    signal = (of_all - squares) / (1 - 1 / n)
    variance = (of_all - signal) / sum(1 / n**2 / size for _, size in every)
    return signal, variance, sum(size for _, size in every)


def unequal_batches() -> list[Any]:
    """Return batches of this process, of other sizes than those of the other processes."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    sizes = [(3, 5, 2, 4), (6, 1, 4, 4)][dist.get_rank()]
    return [
        (torch.randn(n, 8, generator=generator), torch.randn(n, 4, generator=generator))
        for n in sizes
    ]


def check_unequal_batches(folder: Path) -> None:
    """Batches differ within a step and between processes, with and without a scaler."""
    for precision, rel in (("fp32", 1e-3), ("fp16", 0.1)):
        model, data = make_model(), unequal_batches()
        expected = [estimate(model, data[:2]), estimate(model, data[2:])]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        config = hookline.TrainerConfig(
            strategy="ddp",
            runs=folder / precision,
            progress="off",
            accumulate=2,
            shard_loaders=False,
            precision=precision,
        )
        hooks = [hookline.GradientNoiseScale(1, decay=0.0)]
        trainer = hookline.Trainer(config, model, optimizer, loss_fn=F.mse_loss, hooks=hooks)
        trainer.fit(data)
        assert trainer.hooks.summary().failures == {}
        if dist.get_rank() == 0:
            found = logged(trainer, "gradient_noise")
            for step, (signal, variance, samples) in enumerate(expected, 1):
                name = f"{step} gradient_noise/"
                assert found[f"{name}signal"] == pytest.approx(signal, rel=rel, abs=rel / 10)
                assert found[f"{name}variance"] == pytest.approx(variance, rel=rel)
                assert found[f"{name}batch_size"] == samples


def check_bare_loops(folder: Path) -> None:
    """Under DDP all processes are measured together, without it each one is alone."""
    for together in (True, False):
        model, data = make_model(), unequal_batches()
        signal, variance, _ = estimate(model, [(x[:1], y[:1]) for x, y in data])
        called: Any = nn.parallel.DistributedDataParallel(model) if together else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        hook = hookline.GradientNoiseScale(1, batch_size=1)
        runs = folder / f"{together} {dist.get_rank()}"
        with hookline.attach(called, optimizer, hooks=[hook], runs=runs) as session:
            for i, (x, y) in enumerate(data):
                if together:
                    called.require_backward_grad_sync = i == len(data) - 1
                (F.mse_loss(called(x[:1]), y[:1]) / len(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
        run = session.run
        if run is not None and (together or dist.get_rank() == 0):
            found = logged(session, "gradient_noise")
            assert found["1 gradient_noise/batch_size"] == len(data) * (2 if together else 1)
            if together:
                assert found["1 gradient_noise/signal"] == pytest.approx(signal, rel=1e-3, abs=1e-5)
                assert found["1 gradient_noise/variance"] == pytest.approx(variance, rel=1e-3)


def check_same_weights(folder: Path) -> None:
    """Weights are bit for bit the same with and without all hooks that a strategy allows."""
    for strategy in ("ddp", "fsdp"):
        weights = []
        for observed in (False, True):
            hooks: list[hookline.Hook] = []
            if observed:
                hooks = [hookline.OptimizerMonitor(1), hookline.OutlierMonitor(log_frequency=1)]
                hooks += [hookline.LogitMonitor(1), hookline.LossSpikeDetector()]
            if observed and strategy == "ddp":
                hooks += [hookline.Sharpness(1), hookline.GradientNoiseScale(1)]
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4)
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            config = hookline.TrainerConfig(
                strategy=strategy,
                runs=folder,
                progress="off",
                accumulate=2,
                seed=3,
                precision="bf16" if strategy == "ddp" else "fp32",
            )
            trainer = hookline.Trainer(config, model, optimizer, loss_fn=F.mse_loss, hooks=hooks)
            trainer.fit(DataLoader(make_data(), batch_size=4))
            assert trainer.hooks.summary().failures == {}
            own = [local(value).clone() for value in model.state_dict().values()]
            weights.append([*own, torch.get_rng_state()])
        for one, other in zip(*weights, strict=True):
            assert torch.equal(one, other), strategy


def record_spike(folder: Path, found: dict[str, Any]) -> None:
    detector = hookline.LossSpikeDetector(window=8, min_steps=4, steps_after=2)
    trainer = train(folder, detector, strategy="ddp", max_steps=12, lr=1e-5, outlier=True)
    dist.barrier()
    if dist.get_rank() == 0:
        found["spikes"] = [
            event
            for event in hookline.open_run(trainer.run.path).events()
            if event["kind"] == "loss_spike"
        ]


if __name__ == "__main__":
    check_in_all_ranks(check_all)
