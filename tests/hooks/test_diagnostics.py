"""Diagnostics agree with naive references, and change nothing."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from loops import batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline.runs.jsonl_reader import read_records

Values = dict[tuple[int, str], Any]


def fit(
    folder: Path, *hooks: hookline.Hook, parts: Any = None, data: Any = None, **options: Any
) -> Values:
    model, optimizers = parts or (None, None)
    options = {"runs": folder, **options}
    trainer = loops.make_trainer(*hooks, model=model, optimizers=optimizers, **options)
    trainer.fit(batches(4) if data is None else data)
    assert trainer.hooks.summary().failures == {}
    records = read_records(trainer.run.path / "metrics.jsonl")
    return {(one["step"], one["name"]): one["value"] for one in records}


# -- OptimizerMonitor -----------------------------------------------------------------------------


def test_the_effective_rate_of_sgd_is_its_learning_rate(tmp_path: Path) -> None:
    values = fit(tmp_path, hookline.OptimizerMonitor(2))
    assert values[2, "optimizer/total/effective_lr"] == pytest.approx(0.1, rel=1e-5)
    assert not any(name.endswith("rms_ratio") for _, name in values)
    assert {step for step, name in values if name.startswith("optimizer/")} == {2, 4}


# -- GradientNoiseScale ---------------------------------------------------------------------------


def plain_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_noise_scale_is_that_of_the_two_batch_sizes(tmp_path: Path, precision: str) -> None:
    model, optimizer = plain_net()
    reference = copy.deepcopy(model)
    data = batches(4)
    hook = hookline.GradientNoiseScale(1, decay=0.0)
    values = fit(
        tmp_path, hook, parts=(model, optimizer), data=data, accumulate=4, precision=precision
    )
    norms = []
    gradients = []
    for x, y in data:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.mse_loss(reference(x), y)
        own = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))]
        )
        norms.append(own.double().square().sum().item())
        gradients.append(own)
    small = sum(norms) / 4
    big = torch.stack(gradients).mean(0).double().square().sum().item()
    signal = (16 * big - 4 * small) / 12
    variance = (small - big) / (1 / 4 - 1 / 16)
    rel = 1e-4 if precision == "fp32" else 2e-2
    assert values[1, "gradient_noise/signal"] == pytest.approx(signal, rel=rel)
    assert values[1, "gradient_noise/variance"] == pytest.approx(variance, rel=rel)
    if signal > 0:
        assert values[1, "gradient_noise/scale"] == pytest.approx(variance / signal, rel=2 * rel)
    assert values[1, "gradient_noise/batch_size"] == 16


def test_without_micro_batches_there_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = fit(tmp_path, hookline.GradientNoiseScale(1))
    assert not any(name.startswith("gradient_noise") for _, name in values)
    assert sum("several micro-batches" in one.message for one in caplog.records) == 1


def test_a_bare_loop_says_its_batch_size(tmp_path: Path) -> None:
    model, optimizer = plain_net()
    hook = hookline.GradientNoiseScale(1, batch_size=4)
    with hookline.attach(model, optimizer, hooks=[hook], runs=tmp_path) as session:
        for _ in range(2):
            for x, y in batches(2):
                (F.mse_loss(model(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        folder = session.run.path
    names = {one["name"] for one in read_records(folder / "metrics.jsonl")}
    assert "gradient_noise/variance" in names


# -- AttentionMonitor -----------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Attention by hand, whose logits are kept."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.fused = False
        self.logits = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        logits = (q @ k.transpose(-2, -1) / 2).masked_fill(~mask, -math.inf)
        self.logits = logits.detach()
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = logits.softmax(-1) @ v
        return y.transpose(1, 2).flatten(2)


def expected_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = logits.softmax(-1)
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
    return logits.amax((0, 2, 3)), entropy.mean((0, 2))


def attend(folder: Path, monitor: Any, *, fused: bool) -> tuple[Values, torch.Tensor]:
    torch.manual_seed(0)
    model = SelfAttention()
    model.fused = fused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 5, 8)
    data = [(x, torch.randn(3, 5, 8))]
    values = fit(folder, monitor, parts=(nn.Sequential(model), optimizer), data=data)
    return values, model.logits


@pytest.mark.parametrize("fused", [False, True])
def test_logits_and_entropy_are_exact_where_they_are_computed(tmp_path: Path, fused: bool) -> None:
    monitor = hookline.AttentionMonitor(log_frequency=1, per_head=True, recompute=True)
    values, logits = attend(tmp_path, monitor, fused=fused)
    largest, entropy = expected_of(logits)
    assert values[1, "attention/0/max_logit"] == pytest.approx(largest.max().item(), rel=1e-5)
    assert values[1, "attention/0/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)
    for head in range(2):
        found = values[1, f"attention/0/head_{head}/max_logit"]
        assert found == pytest.approx(largest[head].item(), rel=1e-5)


@pytest.mark.parametrize("method", ["disable_hook", "remove_hook"])
def test_a_monitor_that_is_turned_off_within_a_call_leaves_nothing_active(method: str) -> None:
    class TogglingAttention(SelfAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            getattr(trainer.hooks, method)("attention_monitor")
            return super().forward(x)

    class Modes(hookline.Hook):
        def on_after_forward(self) -> None:
            assert not torch.overrides._get_current_function_mode_stack()

    model = nn.Sequential(TogglingAttention(), nn.Linear(8, 8))
    trainer = loops.make_trainer(
        hookline.AttentionMonitor(log_frequency=1), Modes(), model=model, max_steps=1
    )
    trainer.fit([tuple(torch.randn(2, 3, 5, 8))])
    assert trainer.hooks.summary().failures == {}
    assert not any(module._forward_hooks for module in model.modules())


def test_a_failing_measurement_is_a_failure_of_the_monitor(monkeypatch: Any) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("not measured")

    monkeypatch.setattr(
        "hookline.hooks.monitoring.attention_monitor.AttentionCalls._measure_logits", fail
    )
    model = nn.Sequential(SelfAttention())
    trainer = loops.make_trainer(hookline.AttentionMonitor(log_frequency=1), model=model)
    trainer.fit([tuple(torch.randn(2, 3, 5, 8))])
    assert trainer.status == "completed"
    assert trainer.hooks.summary().failures == {"attention_monitor": 1}
    assert not torch.overrides._get_current_function_mode_stack()


def test_an_interrupted_call_leaves_nothing_active() -> None:
    class InterruptedAttention(SelfAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt  # after which PyTorch calls no hook

    trainer = loops.make_trainer(
        hookline.AttentionMonitor(log_frequency=1), model=nn.Sequential(InterruptedAttention())
    )
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit([tuple(torch.randn(2, 3, 5, 8))])
    assert trainer.status == "interrupted"
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_model_without_attention_is_an_error() -> None:
    with pytest.raises(hookline.HookConfigError, match="no module whose class is called"):
        loops.fit(hookline.AttentionMonitor())


# -- Sharpness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sharpness_is_that_of_the_hessian(tmp_path: Path, accumulate: int) -> None:
    model, optimizer = plain_net()
    reference = copy.deepcopy(model).double()
    data = batches(accumulate)
    hook = hookline.Sharpness(1, distance=1e-4)
    values = fit(tmp_path, hook, parts=(model, optimizer), data=data, accumulate=accumulate)
    x, y = (one.double() for one in data[-1])
    parameters = list(reference.parameters())
    gradients = torch.autograd.grad(F.mse_loss(reference(x), y), parameters, create_graph=True)
    square = sum(g.square().sum() for g in gradients)
    fixed = [g.detach() for g in gradients]
    product = torch.autograd.grad(
        sum((g * f).sum() for g, f in zip(gradients, fixed, strict=True)), parameters
    )
    expected = sum((h * f).sum() for h, f in zip(product, fixed, strict=True)) / square
    assert values[1, "sharpness/along_gradient"] == pytest.approx(expected.item(), rel=2e-2)
    assert values[1, "sharpness/times_lr"] == pytest.approx(0.1 * expected.item(), rel=2e-2)


# -- LossSpikeDetector ----------------------------------------------------------------------------


def spiking_data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 8, generator=generator)
    y = torch.randn(160, 4, generator=generator)
    y[100] = 1000.0
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)


def spikes_of(folder: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "loss_spike"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_spike_is_recorded_with_its_batch_and_values(tmp_path: Path, workers: int) -> None:
    loader = spiking_data()
    if workers:
        loader = DataLoader(loader.dataset, batch_size=4, shuffle=True, num_workers=1)
    model, _ = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    detector = hookline.LossSpikeDetector(window=16, min_steps=4, steps_before=3, steps_after=2)
    trainer = loops.make_trainer(
        detector,
        hookline.GradientMonitor(1),
        model=model,
        optimizers=optimizer,
        runs=tmp_path,
        max_epochs=2,
        seed=3,
    )
    trainer.fit(loader)
    spikes = spikes_of(trainer.run.path)
    assert len(spikes) == len(detector.spikes) == 2
    for spike in spikes:
        assert 100 in spike["batches"][0]["indices"]
        assert spike["loss"] == pytest.approx(spike["peak"])
        assert spike["z"] > 6
        steps = [step for step, _ in spike["values"]["gradients/total/norm"]]
        first, last = max(1, spike["step"] - 3), min(80, spike["step"] + 2)
        assert steps == list(range(first, last + 1))


def test_the_state_of_the_detector_is_restored() -> None:
    detector = hookline.LossSpikeDetector(window=8, min_steps=4)
    losses = [1.0, 1.1, 0.9, 1.0, 1.05, 50.0]
    for step, loss in enumerate(losses, 1):
        detector.on_step_end(step, hookline.LazyFloat(loss), {}, None)
    resumed = hookline.LossSpikeDetector(window=8, min_steps=4)
    resumed.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    resumed.on_train_end(6, None)
    assert [spike["step"] for spike in resumed.spikes] == [6]
    assert resumed.spikes[0]["batches"] == []


# -- all of them ----------------------------------------------------------------------------------


def all_of_them() -> list[hookline.Hook]:
    return [
        hookline.OptimizerMonitor(1),
        hookline.GradientNoiseScale(1),
        hookline.AttentionMonitor(log_frequency=1, recompute=True),
        hookline.OutlierMonitor(log_frequency=1),
        hookline.LogitMonitor(1),
        hookline.Sharpness(1),
        hookline.LossSpikeDetector(),
    ]


def encoder() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # with dropout
    model = nn.Sequential(nn.BatchNorm1d(5), layer)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_training_is_the_same_with_and_without(tmp_path: Path, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    data = [tuple(torch.randn(2, 3, 5, 8, generator=generator)) for _ in range(4)]
    weights = []
    for hooks in ([], all_of_them()):
        model, optimizer = encoder()
        seen = Forwards()
        fit(tmp_path, seen, *hooks, parts=(model, optimizer), data=data, seed=1, **options)
        assert seen.count == 4
        weights.append(copy.deepcopy(model.state_dict()) | {"random": torch.get_rng_state()})
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


class Forwards(hookline.Hook):
    count = 0

    def on_after_forward(self) -> None:
        self.count += 1
