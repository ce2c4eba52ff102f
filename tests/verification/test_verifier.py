"""`hookline verify`: faults that are planted are found and named, and clean trainings pass."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from commands import run_hookline
from loops import Net, batches
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hookline
from hookline import ConfigError, Hook, Trainer, UpdateHook
from hookline.cli.app import app
from hookline.verification import Culprit, Report


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left in the temporary folder, and nothing is written to the current one."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "current").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "current")
    yield
    assert not list((tmp_path / "temporary").glob("hookline*"))
    assert not list((tmp_path / "current").iterdir())


def shuffled(dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    if dataset is None:
        x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        dataset = TensorDataset(x, x[:, :4])
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **options})


def maker(
    *hooks: Callable[[], Hook],
    model: Callable[[], nn.Module] = Net,
    data: Callable[[], Any] = shuffled,
    **fields: Any,
) -> Callable[[], Any]:
    def make_trainer() -> Any:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        config = {"max_epochs": 3, "seed": 3, **fields}
        return Trainer(config, net, optimizer, hooks=[hook() for hook in hooks]), data()

    return make_trainer


def results(report: Report) -> dict[str, str]:
    return {check.name.partition(",")[0]: check.result for check in report.checks}


def culprits(report: Report) -> list[Culprit]:
    return [culprit for check in report.checks for culprit in check.culprits]


class Observes(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, loss: float) -> None:
        self.losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Scales(UpdateHook):
    """An update whose factor depends on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {name: g * (1 + 0.1 * self.calls) for name, g in gradients.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class ForgetfulScales(Scales):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_clean_training_passes() -> None:
    def everything() -> Any:
        trainer, loader = maker(
            Observes,
            Scales,
            hookline.GradientMonitor,
            hookline.EMA,
            lambda: hookline.ModelCheckpoint(every_n_steps=2, save_top_k=1, monitor="train/loss"),
            accumulate=2,
        )()
        trainer.add_hook(hookline.LRMonitor(), every=2)
        return trainer, {"a": loader, "b": shuffled(batch_size=6)}, batches(2)

    report = hookline.verify(everything)
    assert report.ok, report
    assert results(report) == {
        "the same seed twice": "ok",
        "resumed after step 3": "ok",
        "resumed after step 5": "ok",
        "resumed after step 6": "ok",
        "observing hooks on and off": "ok",
    }
    hooks = report.checks[-1].compared
    for name in ("observes", "gradient_monitor", "model_checkpoint", "lr_monitor"):
        assert f"'{name}'" in hooks
    assert "'ema'" not in hooks
    assert "'scales'" not in hooks


class ChangesWeights(Hook):
    def on_step_end(self, model: nn.Module, step: int) -> None:
        if step == 4:
            with torch.no_grad():
                next(model.parameters()).add_(1e-6)


class DrawsRandomNumbers(Hook):
    def on_train_batch_end(self) -> None:
        torch.rand(1)


class Stops(Hook):
    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 5:
            trainer.stop("enough")


@pytest.mark.parametrize("fault", [ChangesWeights, DrawsRandomNumbers, Stops])
def test_a_hook_that_does_not_say_that_it_intervenes_is_named(fault: type[Hook]) -> None:
    report = hookline.verify(maker(Observes, hookline.GradientMonitor, fault, hookline.LRMonitor))
    assert results(report)["observing hooks on and off"] == "failed"
    (culprit,) = culprits(report)
    name = {
        ChangesWeights: "changes_weights",
        DrawsRandomNumbers: "draws_random_numbers",
        Stops: "stops",
    }[fault]
    assert (culprit.kind, culprit.name) == ("hook", name)
    assert "does not say `intervenes = True`" in culprit.reason


class Counts(Dataset[Any]):
    """A dataset whose items depend on how many were loaded before."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, idx: int) -> Any:
        self.loaded += 1
        return torch.full((8,), float(idx)), torch.full((4,), self.loaded / 100)


def test_a_dataset_with_hidden_state_is_named_by_its_loader() -> None:
    def data() -> Any:
        return {"counting": shuffled(Counts()), "clean": shuffled()}

    report = hookline.verify(maker(Observes, data=data), steps=16)
    assert results(report)["the same seed twice"] == "ok"
    (culprit, *_) = culprits(report)
    assert (culprit.kind, culprit.name) == ("loader", "counting")


class Warms(nn.Module):
    """Scales its input by a number that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor += 0.1
        return x * self.factor


class NoisyByTime(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (time.perf_counter_ns() % 1000) * 1e-6)


def sequential(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 4), module(), nn.Tanh())


def test_a_module_with_state_outside_of_its_state_dict_is_named() -> None:
    report = hookline.verify(maker(Observes, model=sequential(Warms)), steps=6)
    assert results(report) == {
        "the same seed twice": "ok",
        "resumed after step 3": "failed",
        "observing hooks on and off": "ok",
    }
    (culprit,) = culprits(report)
    assert (culprit.kind, culprit.name) == ("module", "1")
    assert "Warms returns something else for the same input in step 4" in culprit.reason


def test_code_in_a_forward_is_named_by_its_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"block": Block()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner["block"](x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.linear = 0, nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x + self.calls)

    report = hookline.verify(maker(model=Outer), steps=4)
    (culprit,) = culprits(report)
    assert (culprit.kind, culprit.name) == ("module", "inner.block")
    assert "calls 'inner.block.linear' with another input" in culprit.reason


def test_an_update_that_does_not_restore_its_state_is_named() -> None:
    report = hookline.verify(maker(Observes, ForgetfulScales), steps=6)
    assert results(report)["resumed after step 3"] == "failed"
    (culprit,) = culprits(report)
    assert (culprit.kind, culprit.name) == ("hook", "forgetful_scales")


def test_an_observer_whose_state_is_not_restored_is_named_with_what() -> None:
    class Forgets(Observes):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.started = 0.0, time.perf_counter()  # times are not compared

        def on_step_end(self, loss: float) -> None:
            self.total += loss

        def state_dict(self) -> dict[str, Any]:
            return {"total": self.total, "started": self.started}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    report = hookline.verify(maker(Forgets), steps=6)
    assert results(report)["resumed after step 3"] == "failed"
    (culprit,) = culprits(report)
    assert (culprit.kind, culprit.name) == ("hook", "forgets")
    assert culprit.reason == "after resuming, 'forgets.total' of its state differs"
    assert any("'forgets.started'" in note for note in report.notes)


def test_notes_say_what_was_not_checked() -> None:
    sent = lambda: hookline.NotificationHook(webhook_url="https://example.invalid")  # noqa: E731
    report = hookline.verify(maker(sent), steps=4)
    assert report.ok
    notes = "\n".join(report.notes)
    assert "4 steps do not go beyond the end of an epoch (6 steps)" in notes
    assert "send messages or write to a place of their own: 'notification'" in notes


def test_an_error_of_the_training_is_raised_and_one_after_resuming_is_reported() -> None:
    class Unrestorable(Observes):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("not possible")

    report = hookline.verify(maker(Unrestorable), steps=4)
    failed = report.checks[1]
    assert failed.result == "failed"
    assert "not possible" in failed.difference
    assert [culprit.name for culprit in failed.culprits] == ["unrestorable"]
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        hookline.verify(maker(model=lambda: nn.Linear(3, 4)), steps=4)


def test_make_trainer_has_to_create_everything() -> None:
    made = maker()()
    with pytest.raises(ConfigError, match="the same model twice"):
        hookline.verify(lambda: made)
    with pytest.raises(ConfigError, match="returned a str"):
        hookline.verify(lambda: "trainer")
    with pytest.raises(ConfigError, match="steps is 1"):
        hookline.verify(maker(), steps=1)


PROJECT = """
import torch
from torch import nn
import hookline

def batches():
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :4])

class Nudges(hookline.Hook):
    def on_step_end(self, model):
        import late
        with torch.no_grad():
            model.bias.add_(1e-6)
"""

CONFIG = """\
seed: 0
model: {class_path: torch.nn.Linear, init_args: {in_features: 8, out_features: 4}}
data: {train: {class_path: net.batches, loader: {batch_size: 4, shuffle: true}}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
hooks: [lr_monitor, console_log]
"""


def test_the_command_exits_with_0_or_1(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "net.py").write_text(PROJECT)
    (project / "late.py").write_text("")
    (project / "train.yaml").write_text(CONFIG)
    clean = run_hookline("verify", "train.yaml", "--steps", 8, cwd=project)
    assert clean.returncode == 0, clean.stderr
    assert clean.stderr == ""
    assert "resumed after step 6, the end of an epoch  ok " in clean.stdout
    fault = run_hookline(
        "verify", "train.yaml", "hooks=[lr_monitor, net.Nudges]", "--json", cwd=project
    )
    assert fault.returncode == 1, fault.stderr
    report = json.loads(fault.stdout)
    assert not report["ok"]
    (culprit,) = report["checks"][-1]["culprits"]
    assert (culprit["kind"], culprit["name"]) == ("hook", "nudges")
    with pytest.raises(typer.BadParameter, match="it is 1; expected"):
        app(["verify", "train.yaml", "--steps", "1"], standalone_mode=False)
    assert not (project / "runs").exists()
