"""A hook leaves the same names in the record, whichever loop it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from loops import batches, fit, make, train
from torch.nn import functional as F

import hookline
from hookline.config.hook_names import BUILT_INS, PROBES, find_hook

STEPS = 6

OPTIONS: Mapping[str, Mapping[str, Any]] = {  # those that record within a few steps
    "gradient_monitor": {"log_frequency": 2, "log_histogram": True},
    "lr_monitor": {"log_momentum": True, "log_weight_decay": True},
    "activation_stats": {"log_interval": 2},
    "monitor": {"modules": "first"},
    "optimizer_monitor": {"log_frequency": 2},
    "outlier_monitor": {"modules": "first", "log_frequency": 2},
    "logit_monitor": {"log_frequency": 2},
}
ELSEWHERE = {  # these need other loops and models: tests/hooks/test_diagnostics.py
    "attention_monitor": "attention",
    "gradient_noise_scale": "accumulation, or several ranks",
    "loss_spike_detector": "a spike",
    "sharpness": "the trainer",
}


def hook_class(name: str) -> Any:
    module, _, class_name = find_hook(name).path.rpartition(".")
    return getattr(__import__(module, fromlist=[class_name]), class_name)


def recorded(folder: Path) -> set[str]:
    (run,) = folder.iterdir()
    return {row["name"] for row in hookline.open_run(run).metrics()}


def in_trainer(hook: Any, folder: Path) -> set[str]:
    fit(hook, data=batches(STEPS), runs=folder, max_epochs=1, loss_fn=F.mse_loss)
    return recorded(folder)


def in_loop(hook: Any, folder: Path, *, told: bool) -> set[str]:
    model, optimizer = make()
    with (
        hookline.attach(model, optimizer, hooks=[hook], runs=folder) as session,
        session.epoch() if told else nullcontext(),
    ):
        for batch in session.batches(batches(STEPS)) if told else batches(STEPS):
            train(model, optimizer, [batch])
    return recorded(folder)


def test_all_hooks_that_record_are_compared():
    records = {name for name in {**BUILT_INS, **PROBES} if hook_class(name).hookline_records}
    assert records - set(ELSEWHERE) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_built_in_hook_leaves_the_same_names(name: str, tmp_path: Path) -> None:
    make_hook: Callable[[], Any] = lambda: hook_class(name)(**OPTIONS[name])  # noqa: E731
    expected = in_trainer(make_hook(), tmp_path / "trainer")
    assert len(expected) > 2
    assert in_loop(make_hook(), tmp_path / "told", told=True) == expected
    expected -= {"train/loss_epoch"}  # it has no epochs
    assert in_loop(make_hook(), tmp_path / "unchanged", told=False) == expected


class Logs(hookline.Hook):
    """Logs a value in most events."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_start(self, trainer):
        trainer.log(f"{self.name}_start", 1.0)

    def on_before_forward(self, trainer):
        trainer.log(f"{self.name}_forward", 1.0)

    def on_after_backward(self, trainer):
        trainer.log(f"{self.name}_backward", 1.0)

    def on_gradients_ready(self, trainer):
        trainer.log(f"{self.name}_gradients", 1.0)

    def on_step_end(self, trainer):
        trainer.log(f"{self.name}_step", 1.0)

    def on_train_end(self, trainer):
        trainer.log(f"{self.name}_end", 1.0)


def test_what_a_hook_logs_has_its_name_in_every_loop(tmp_path: Path) -> None:
    name = "own/value"
    expected = in_trainer(Logs(name), tmp_path / "trainer")
    assert len(expected) == 6 + 2
    assert in_loop(Logs(name), tmp_path / "told", told=True) == expected
    unchanged = in_loop(Logs(name), tmp_path / "unchanged", told=False)
    assert unchanged == expected - {"train/loss_epoch"}


def test_a_loop_within_a_hook_logs_as_a_loop(tmp_path: Path) -> None:
    class Outer(hookline.Hook):
        def on_train_end(self):
            model, optimizer = make()
            with hookline.attach(model, optimizer, runs=tmp_path) as session:
                session.log("size", 4.0)
                train(model, optimizer, batches(1))

    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[Outer()]):
        train(model, optimizer, batches(1))
    assert recorded(tmp_path) == {"train/size", "train/loss"}
