"""Promises that no other suite holds: found by mistakes in the code that no test noticed."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from every_loop import LOOPS
from loops import batches, fit, make, make_trainer, same, train, weights
from rank_checks import run_ranks
from resumed_training import text_of
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hookline
from hookline import HooklineError, Trainer, TrainerConfig
from hookline.checkpoint import load_checkpoint


class Rates(hookline.Hook):
    """Notes the learning rate before each step, and the one that the end of the step gets."""

    def __init__(self) -> None:
        self.used: list[float] = []
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.used.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, lr: float, ctx: hookline.StepContext) -> None:
        assert ctx.lr == lr
        self.seen.append(lr)


def test_the_learning_rate_is_the_one_that_the_step_used() -> None:
    rates = Rates()
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    config = TrainerConfig(runs=None, progress="off", scheduler_every="step")
    Trainer(config, model, optimizer, scheduler, hooks=[rates]).fit(batches(4))
    assert rates.seen == rates.used == [0.1, 0.05, 0.025, 0.0125]


class Gradients(hookline.Hook):
    """Notes the gradients that the optimizer uses, and those at the end of the step."""

    def __init__(self) -> None:
        self.used: list[list[torch.Tensor]] = []
        self.seen: list[list[torch.Tensor | None]] = []

    def on_before_optimizer_step(self, model: nn.Module) -> None:
        self.used.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    def on_step_end(self, model: nn.Module) -> None:
        self.seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])


@pytest.mark.parametrize("loop", LOOPS)
def test_at_the_end_of_a_step_the_gradients_are_those_that_the_optimizer_used(
    loop: str, tmp_path: Path
) -> None:
    gradients = Gradients()
    LOOPS[loop]([gradients], tmp_path)
    assert len(gradients.seen) == len(gradients.used) == 6
    for seen, used in zip(gradients.seen, gradients.used, strict=True):
        assert len(seen) == len(used) == 4
        assert all(a is not None and torch.equal(a, b) for a, b in zip(seen, used, strict=True))


class Failing(hookline.Hook):
    """Stops training after two steps, and notes what it is told after that."""

    critical = True

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_step_end(self, step: int) -> None:
        if step == 2:
            raise ValueError("training depends on this hook")

    def on_exception(self, exception: BaseException) -> None:
        self.told.append(f"exception {type(exception).__name__}")

    def on_train_end(self, status: str) -> None:
        self.told.append(f"train_end {status}")


@pytest.mark.parametrize("loop", LOOPS)
def test_after_an_exception_hooks_are_told_that_training_has_ended(
    loop: str, tmp_path: Path
) -> None:
    failing = Failing()
    with pytest.raises(hookline.HookFailedError):
        LOOPS[loop]([failing], tmp_path)
    assert failing.told == ["exception HookFailedError", "train_end error"]
    (run,) = (tmp_path / "runs").iterdir()
    assert hookline.open_run(run).status == "error"


class Draws(Dataset[Any]):
    """Has random samples, so that loading them uses random numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8), torch.randn(4)


def test_validation_uses_no_random_numbers_of_training() -> None:
    plain = fit(seed=3, max_epochs=2)
    val = DataLoader(Draws(), batch_size=2, shuffle=True)
    validated = fit(seed=3, max_epochs=2, val=val, validate_every_steps=2, sanity=True)
    assert same(weights(validated.model), weights(plain.model))


def test_validation_leaves_each_module_in_its_mode() -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.model.drop.eval()
    trainer.fit(batches(2), batches(1))
    assert trainer.model.training
    assert not trainer.model.drop.training


class SavesAndReads(hookline.Hook):
    """Asks for a checkpoint after the second step, and reads each one that it is told of."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.read: list[int] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 2:
            trainer.save_checkpoint()

    def on_checkpoint_save(self, path: str, step: int) -> None:
        self.told.append(step)
        assert load_checkpoint(path).info["step"] == step
        self.read.append(step)


@pytest.mark.parametrize("loop", ["trainer", "bare loop", "accelerate loop"])
def test_a_checkpoint_is_complete_when_hooks_are_told_of_it(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def sync_slowly(handle: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    hook = SavesAndReads()
    LOOPS[loop]([hook], tmp_path)
    assert hook.told == hook.read == [2]


class StopsAt(hookline.Hook):
    """Ends the process's training after a step, as a crash would."""

    critical = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int) -> None:
        if step == self.step:
            raise RuntimeError("the process ends here")


def test_a_resumed_run_still_removes_the_checkpoints_from_before(tmp_path: Path) -> None:
    def make_saving(*hooks: hookline.Hook) -> Trainer:
        saving = hookline.ModelCheckpoint(every_n_steps=1, save_top_k=2)
        return make_trainer(saving, *hooks, runs=tmp_path, max_epochs=1)

    with pytest.raises(hookline.HookFailedError):
        make_saving(StopsAt(4)).fit(batches(6))
    (run,) = tmp_path.iterdir()
    resumed = make_saving(StopsAt(-1)).fit(batches(6), resume_from=run)
    assert resumed.run.path == run
    folders = sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())
    assert folders == ["epoch=0-step=5", "epoch=0-step=6"]


class Counts(hookline.Hook):
    """Counts steps, in its state; may fail to load it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.steps, self.fails = 0, fails

    def on_step_end(self, trainer: Any) -> None:
        self.steps += 1
        if self.steps == 2:
            trainer.disable_hook("toggled")

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise ValueError("this hook cannot load its state")
        self.steps = state["steps"]


class Toggled(hookline.Hook):
    """Is disabled by `Counts` after two steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, step: int) -> None:
        self.steps.append(step)


class Parts:
    """The objects that are trained: a model, an optimizer and a scheduler, with hooks."""

    def __init__(self, *, fails: bool = False) -> None:
        self.model, self.optimizer = make(momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.toggled = Toggled()
        self.manager = hookline.HookManager()
        self.counts = Counts()
        self.manager.add_hook(self.toggled, name="toggled")
        self.manager.add_hook(self.counts, name="counts")
        self.manager.add_hook(Counts(fails=fails), name="last")

    def in_trainer(self, epochs: int, path: Path | None, save: Path | None = None) -> None:
        config = TrainerConfig(runs=None, progress="off", max_epochs=epochs)
        trainer = Trainer(config, self.model, self.optimizer, self.scheduler, hooks=self.manager)
        trainer.fit(batches(3), resume_from=path)
        if save is not None:
            trainer.save_checkpoint(save)

    def in_bare_loop(self, epochs: int, path: Path | None, save: Path | None = None) -> None:
        session = hookline.attach(
            self.model, self.optimizer, schedulers=self.scheduler, hooks=self.manager
        )
        try:
            start = None if path is None else session.load_checkpoint(path)
            with session:
                for _ in range(epochs if start is None else epochs - 1):
                    train(self.model, self.optimizer, batches(3))
                    self.scheduler.step()
                if save is not None:
                    session.save_checkpoint(save, wait=True)
        finally:
            session.detach()

    def states(self) -> tuple[str, list[str], int]:
        statuses = [info.status for info in self.manager.describe()]
        return text_of(self.model, self.optimizer, self.scheduler), statuses, self.counts.steps


DRIVERS = {"trainer": Parts.in_trainer, "bare loop": Parts.in_bare_loop}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_hook_that_was_disabled_stays_disabled_after_resuming(
    driver: str, tmp_path: Path
) -> None:
    first, second = Parts(), Parts()
    DRIVERS[driver](first, 1, None, tmp_path / "saved")
    assert first.toggled.steps == [1, 2]
    DRIVERS[driver](second, 2, tmp_path / "saved")
    assert second.counts.steps == 6
    assert second.toggled.steps == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_checkpoint_whose_last_part_cannot_be_loaded_changes_nothing(
    driver: str, tmp_path: Path
) -> None:
    DRIVERS[driver](Parts(), 1, None, tmp_path / "saved")
    other = Parts(fails=True)
    before = other.states()
    with pytest.raises(HooklineError, match="cannot load its state"):
        DRIVERS[driver](other, 2, tmp_path / "saved")
    assert other.states() == before


class Notes(hookline.Hook):
    """Has an attribute of the loop in checkpoints, and saves as soon as one was loaded."""

    def __init__(self, again: Path | None = None) -> None:
        self.again = again

    def on_train_start(self, trainer: Any) -> None:
        trainer.note = 0
        trainer.register_for_checkpoint("note")

    def on_step_end(self, trainer: Any, step: int) -> None:
        trainer.note = step * 10

    def on_checkpoint_load(self, trainer: Any) -> None:
        if self.again is not None:
            trainer.save_checkpoint(self.again)


def compute(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return {"loss": loss, "accuracy": 1.0 - loss.detach()}


def text_by_key(checkpoint: Path) -> dict[str, str]:
    """Return all that a checkpoint has as texts, by section."""
    found = load_checkpoint(checkpoint)
    # Not `metrics`, those of the epoch's last validation: a bare loop does not restore them.
    info = {name: value for name, value in found.info.items() if name != "metrics"}
    parts = {**found.state, "model": dict(found.model), "info": info}
    return {
        name: json.dumps(part, default=lambda value: getattr(value, "tolist", value.__str__)())
        for name, part in parts.items()
    }


def train_trainer(folder: Path, again: Path | None) -> None:
    """Train half of an epoch with all that has a state, and save; or load, and save at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4))
    optimizers = [torch.optim.AdamW(model[i].parameters(), lr=0.01) for i in (0, 2)]
    config = TrainerConfig(
        max_steps=5,
        max_epochs=2,
        runs=None,
        progress="off",
        precision="fp16",
        optimizer_every=[1, 2],
        validate_every_steps=2,
        seed=1,
    )
    trainer = Trainer(
        config,
        model,
        optimizers,
        [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers],
        step_fn=compute,
        tokens_fn=lambda batch: 7,
        hooks=[Toggled(), Counts(), Notes(again), hookline.EMA(every_n_steps=1)],
    )
    trainer.add_hook(hookline.updates.Noise(0.01, seed=1))
    samples = [(x[0], y[0]) for x, y in batches(8)]
    loader = DataLoader(samples, batch_size=1, shuffle=True, generator=torch.Generator())
    trainer.fit(loader, batches(2), resume_from=None if again is None else folder)
    if again is None:
        trainer.save_checkpoint(folder)


def train_bare_loop(folder: Path, again: Path | None) -> None:
    """Do the same in a bare loop."""
    model, optimizer = make(momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    session = hookline.attach(
        model,
        optimizer,
        schedulers=scheduler,
        scaler=scaler,
        tokens=lambda batch: 7,
        hooks=[Toggled(), Counts(), Notes(), hookline.EMA(every_n_steps=1)],
    )
    session.add_hook(hookline.updates.Noise(0.01, seed=1))
    if again is not None:
        session.load_checkpoint(folder)
        with session, session.epoch():
            session.save_checkpoint(again, extra={"own": 3}, wait=True)
        return
    with session, session.epoch():
        session.best_accuracy = 0.5
        for x, y in session.batches(batches(5)):
            loss = nn.functional.mse_loss(model(x), y)
            session.log("seen", len(x))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        with session.validation():
            session.log("loss", 0.25)
        session.save_checkpoint(folder, extra={"own": 3}, wait=True)


@pytest.mark.parametrize("train_or_resume", [train_trainer, train_bare_loop])
def test_a_checkpoint_that_is_loaded_and_saved_again_is_the_same(
    train_or_resume: Any, tmp_path: Path
) -> None:
    """Nothing that a checkpoint has gets lost or is set anew when training resumes."""
    train_or_resume(tmp_path / "first", None)
    torch.manual_seed(99)
    train_or_resume(tmp_path / "first", tmp_path / "second")
    first, second = text_by_key(tmp_path / "first"), text_by_key(tmp_path / "second")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_two_ranks_validate_one_model_wait_for_saves_and_end_together(tmp_path: Path) -> None:
    assert run_ranks("promise_ranks.py", tmp_path).count("fine") == 2
