"""Rules 10, 11 and 12: restored states, averages of the weights, and true records."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lint_loops import Layers, assert_none_failed, layers, loss_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hookline
from hookline.hooks.lint.finding import Finding


def build() -> tuple[Layers, Any, Any]:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, CosineAnnealingLR(optimizer, 100)


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int = 6) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()


def resume(tmp_path: Path, *, leave_out: str = "", restart: bool = False) -> dict[str, Finding]:
    """Train, save, build anew, load, and return the findings of what follows."""
    file = tmp_path / "saved.pt"
    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    hook = hookline.Lint()  # before anything is loaded, as `hookline lint` does
    model, optimizer, scheduler = build()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = torch.load(file)
    for name, part in parts.items():
        if name != leave_out:
            part.load_state_dict(state[name])
    if restart:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = CosineAnnealingLR(optimizer, 100)
    with hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, scheduler)
    assert_none_failed(hook)
    return {finding.check: finding for finding in hook.findings}


def test_a_run_that_is_resumed_whole_has_no_finding(tmp_path: Path) -> None:
    assert resume(tmp_path) == {}


def test_moments_that_were_not_loaded_are_found_in_the_first_step(tmp_path: Path) -> None:
    finding = resume(tmp_path, leave_out="optimizer")["state-not-restored"]
    assert (finding.step, finding.subject) == (1, "AdamW")
    assert "'optimizer'" in finding.message


def test_a_schedule_that_was_not_loaded_is_found(tmp_path: Path) -> None:
    found = resume(tmp_path, leave_out="scheduler")
    assert "schedule" in found["state-not-restored"].message


def test_an_optimizer_that_is_made_anew_after_loading_is_found(tmp_path: Path) -> None:
    found = resume(tmp_path, restart=True)
    assert found["optimizer-state-lost-after-loading"].subject == "AdamW"


def test_fine_tuning_with_another_optimizer_is_no_finding(tmp_path: Path) -> None:
    file = tmp_path / "saved.pt"
    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    hook = hookline.Lint()
    model = layers()
    model.load_state_dict(torch.load(file)["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
    with hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, CosineAnnealingLR(optimizer, 100))
    assert hook.findings == []


# -- averages --------------------------------------------------------------------------------------


class Ema:
    def __init__(self, model: nn.Module, kind: str) -> None:
        self.kind, self.decay = kind, 0.99
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        if kind == "alias":
            self.shadow = {name: p.data for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        part = {"sign": -(1 - self.decay), "exchanged": self.decay}.get(self.kind, 1 - self.decay)
        for name, parameter in model.named_parameters():
            self.shadow[name] = self.shadow[name] + part * (parameter - self.shadow[name])


def average(kind: str) -> dict[str, Finding]:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema, hook = Ema(model, kind), hookline.Lint()
    if kind == "alias":
        ema.update = lambda model: None  # type: ignore[method-assign]
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(14):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            ema.update(model)
    assert_none_failed(hook)
    return {finding.check: finding for finding in hook.findings}


@pytest.mark.parametrize(
    ("kind", "check", "text"),
    [
        ("sign", "average-moves-away", "moves away"),
        ("exchanged", "average-moves-away", "0.99"),
        ("alias", "average-moves-away", "same memory"),
    ],
)
def test_a_wrong_average_is_found(kind: str, check: str, text: str) -> None:
    found = average(kind)
    assert set(found) == {check}
    assert "ema.shadow" in found[check].subject
    assert text in found[check].message


@pytest.mark.parametrize("kind", ["right", "torch's", "hard copies", "frozen teacher"])
def test_averages_that_are_right_are_not_found(kind: str) -> None:
    if kind == "right":
        assert average(kind) == {}
        return
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    teacher = copy.deepcopy(model).requires_grad_(False)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    hook = hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(14):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if kind == "torch's":
                averaged.update_parameters(model)
            if kind == "hard copies" and step % 3 == 0:
                teacher.load_state_dict(model.state_dict())
    assert hook.findings == []


def test_an_average_whose_counter_was_lost_is_found() -> None:
    def run(counter: int) -> dict[str, Finding]:
        model, optimizer, scheduler = build()
        train(model, optimizer, scheduler)
        ema_model = copy.deepcopy(layers(1)).requires_grad_(False)
        hook = hookline.Lint()
        optimizer.load_state_dict(optimizer.state_dict())
        with hookline.attach(model, optimizer, hooks=[hook]):
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                part = 10 / (11 + counter + step)
                for mean, parameter in zip(ema_model.parameters(), model.parameters(), strict=True):
                    mean.data.lerp_(parameter.data, part)
        return {finding.check: finding for finding in hook.findings}

    assert set(run(0)) == {"average-restarts-after-loading"}
    assert run(1000) == {}


# -- the record ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hides", [True, False])
def test_a_loss_that_hugging_face_hides_is_found(tmp_path: Path, hides: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 1), 0

        def forward(self, x: Any = None, labels: Any = None) -> Any:
            self.calls += 1
            out = self.layer(x).squeeze(-1)
            loss = (out - labels).square().mean() * (float("nan") if self.calls == 3 else 1)
            return {"loss": loss, "logits": out}

    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(16)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=4,
        logging_nan_inf_filter=hides,
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=rows)
    hook = hookline.Lint(only=["nonfinite-loss-hidden"])
    hookline.attach(trainer, hooks=[hook])
    trainer.train()
    assert [(f.check, f.step) for f in hook.findings] == [("nonfinite-loss-hidden", 3)] * hides


# -- what load_state_dict does ---------------------------------------------------------------------


def lint_loaded(load: Any, *, at: int = 0, lr: float = 0.1) -> set[str]:
    """Return what is found in a loop that calls `load(model, optimizer)` before a step."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    hook = hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(at + 3):
            if step == at:
                load(model, optimizer)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert_none_failed(hook)
    return {finding.check for finding in hook.findings}


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_a_state_of_which_nothing_fits_is_found(prefix: str) -> None:
    state = {f"{prefix}{key}": value for key, value in layers(1).state_dict().items()}
    found = lint_loaded(lambda model, _: model.load_state_dict(state, strict=False))
    assert found == ({"nothing-loaded"} if prefix else set())


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_state_that_is_a_reference_is_found(is_copied: bool) -> None:
    kept: list[Any] = []

    def load(model: nn.Module, optimizer: Any) -> None:
        state = model.state_dict()
        kept.append(copy.deepcopy(state) if is_copied else state)
        model.load_state_dict(kept[0])

    assert lint_loaded(load, at=2) == (set() if is_copied else {"state-is-reference"})


@pytest.mark.parametrize("case", ["higher", "set again", "lower"])
def test_a_learning_rate_that_a_checkpoint_brings_back_is_found(case: str) -> None:
    other = layers()
    old = torch.optim.Adam(other.parameters(), lr=1e-3 if case == "lower" else 0.5)
    loss_of(other, 0).backward()
    old.step()

    def load(model: nn.Module, optimizer: Any) -> None:
        optimizer.load_state_dict(old.state_dict())
        if case == "set again":
            optimizer.param_groups[0]["lr"] = 0.01

    expected = {"learning-rate-of-old-run"} if case == "higher" else set()
    assert lint_loaded(load, lr=0.01) == expected


class Counting(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += len(x)
        return super().forward(x)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_counter_that_is_averaged_is_found(use_buffers: bool) -> None:
    model = Counting()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook = hookline.Lint(only=["average-of-counters"])
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            average.update_parameters(model)
    assert len(hook.findings) == use_buffers
