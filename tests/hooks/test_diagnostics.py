"""Diagnostics agree with naive references, and change nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from loops import batches
from torch import nn

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


def test_without_micro_batches_there_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = fit(tmp_path, hookline.GradientNoiseScale(1))
    assert not any(name.startswith("gradient_noise") for _, name in values)
    assert sum("several micro-batches" in one.message for one in caplog.records) == 1


# -- AttentionMonitor -----------------------------------------------------------------------------


class SelfAttention(nn.Linear):
    """Attention by hand."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return (x @ x.transpose(-2, -1)).softmax(-1) @ x


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
        "hookline.hooks.monitoring.attention_monitor.AttentionCalls._measure_softmax", fail
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


# -- all of them ----------------------------------------------------------------------------------


def all_of_them() -> list[hookline.Hook]:
    return [
        hookline.OptimizerMonitor(1),
        hookline.GradientNoiseScale(1),
        hookline.AttentionMonitor(log_frequency=1),
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
