"""Loading a checkpoint into a training that differs: everything is listed, and what fits loads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import batches, make
from torch import nn

import hookline
from hookline.checkpoint import (
    Checkpoint,
    describe_differences,
    load_checkpoint,
    save_checkpoint,
    select_fitting,
)
from hookline.checkpoint.differences import describe_hook_differences
from hookline.runs.checkpoint_reader import read_checkpoints


class Training:
    """A model with optimizers and schedulers, and the state that a checkpoint of it would have."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizers = optimizers or (torch.optim.AdamW(model.parameters(), lr=0.1),)
        self.schedulers: list[Any] = []
        self.hooks: dict[str, Any] = {}

    def step(self) -> Training:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in self.optimizers:
            optimizer.step()
        return self

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "hooks": self.hooks,
            "step": 7,
            "classes": {
                "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
                "schedulers": [type(scheduler).__name__ for scheduler in self.schedulers],
            },
        }

    def save(self, folder: Path) -> Checkpoint:
        model = self.model.state_dict()
        return load_checkpoint(
            save_checkpoint(folder / "a", model=model, state=self.state_dict(), info={})
        )

    def differences_from(self, checkpoint: Checkpoint) -> list[str]:
        model = self.model.state_dict()
        return describe_differences(checkpoint, model=model, state=self.state_dict())


def net(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(i, o) for i, o in pairwise(widths)))


def test_a_checkpoint_of_the_same_training_has_no_differences(tmp_path: Path) -> None:
    saved = Training(net(2, 3, 4)).step().save(tmp_path)
    assert Training(net(2, 3, 4)).differences_from(saved) == []
    assert Training(net(2, 3, 4)).step().differences_from(saved) == []


def test_a_trainers_own_state_fits_before_and_after_training(tmp_path: Path) -> None:
    def trainer() -> hookline.Trainer:
        model, optimizer = make()
        config = hookline.TrainerConfig(max_epochs=1, runs=tmp_path, progress="off")
        made = hookline.Trainer(config, model, optimizer)
        made.add_hook(hookline.EMA())
        return made

    trained = trainer().fit(batches(4))
    saved = load_checkpoint(Path(trained.save_checkpoint() or ""))
    fresh = trainer()
    for own in (trained, fresh):
        model = own.model.state_dict()
        assert describe_differences(saved, model=model, state=own.state_dict()) == []
    fresh.remove_hook("ema")
    assert describe_differences(
        saved, model=fresh.model.state_dict(), state=fresh.state_dict()
    ) == ["saved states without a hook: 'ema'"]


def test_all_differences_are_listed_at_once(tmp_path: Path) -> None:
    before = Training(net(2, 3, 4, 5)).step()
    before.optimizers = (*before.optimizers, torch.optim.SGD(before.model.parameters(), lr=1.0))
    before.schedulers = [torch.optim.lr_scheduler.StepLR(before.optimizers[0], 3)]
    before.hooks = {"ema": {}, "early_stopping": {}}
    saved = before.save(tmp_path)

    model = net(2, 3, 6)
    model[0].to(torch.float64)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    here = Training(model, torch.optim.SGD(groups, lr=0.1))
    here.schedulers = [torch.optim.lr_scheduler.ConstantLR(here.optimizers[0])]
    here.hooks = {"ema": {}, "time_limit": {}}
    assert here.differences_from(saved) == [
        "the model lacks '2.bias', '2.weight'",
        "'1.bias' is (4,) in the checkpoint and (6,) here",
        "'1.weight' is (4, 3) in the checkpoint and (6, 3) here",
        "'0.bias' is torch.float32 in the checkpoint and torch.float64 here",
        "'0.weight' is torch.float32 in the checkpoint and torch.float64 here",
        "the checkpoint has 2 optimizers, and here is 1",
        "optimizer 0 is AdamW in the checkpoint and SGD here",
        "optimizer 0 has 1 parameter group in the checkpoint and 2 here",
        "scheduler 0 is StepLR in the checkpoint and ConstantLR here",
        "the checkpoint has no state of these hooks: 'time_limit'",
        "saved states without a hook: 'early_stopping'",
    ]


def test_parameters_of_a_group_and_shapes_of_an_optimizers_state_are_compared(
    tmp_path: Path,
) -> None:
    saved = Training(net(2, 3)).step().save(tmp_path)
    model = net(2, 3)
    frozen = Training(model, torch.optim.AdamW([model[0].weight], lr=0.1))
    assert frozen.differences_from(saved) == [
        "group 0 of optimizer 0 has 2 parameters in the checkpoint and 1 here"
    ]
    swapped = Training(model, torch.optim.AdamW([model[0].bias, model[0].weight])).step()
    assert swapped.differences_from(saved) == [
        f"'{key}' of parameter {index} of optimizer 0 is {was} in the checkpoint and {now} here"
        for index, was, now in ((0, (3, 2), (3,)), (1, (3,), (3, 2)))
        for key in ("exp_avg", "exp_avg_sq")
    ]


def test_named_parameters_in_another_order_are_noticed_before_the_first_step(
    tmp_path: Path,
) -> None:
    model = net(2, 3)
    named = list(model.named_parameters())
    saved = Training(model, torch.optim.AdamW(named)).step().save(tmp_path)
    swapped = Training(net(2, 3), torch.optim.AdamW(named[::-1]))
    assert swapped.differences_from(saved) == [
        "group 0 of optimizer 0 has '0.weight' in the checkpoint where '0.bias' is here"
    ]


def test_a_checkpoint_without_classes_is_compared_without_them(tmp_path: Path) -> None:
    saved = Training(net(2, 3)).step().save(tmp_path)
    del saved.state["classes"]
    model = net(2, 3)
    assert Training(model, torch.optim.SGD(model.parameters())).differences_from(saved) == []


def test_many_differences_of_one_kind_are_counted(tmp_path: Path) -> None:
    saved = Training(net(*[2] * 9)).save(tmp_path)
    lines = Training(net(*[3] * 9)).differences_from(saved)
    assert len(lines) == 6
    assert lines[-1] == "and 11 other shapes"
    names = {f"hook_{number}": {} for number in range(7)}
    (line,) = describe_hook_differences(names, {})
    assert line.endswith("'hook_4' and 2 more")


def test_what_fits_is_loaded_and_the_rest_stays(tmp_path: Path) -> None:
    before = Training(net(2, 3, 4)).step()
    before.schedulers = [torch.optim.lr_scheduler.StepLR(before.optimizers[0], 3)]
    saved = before.save(tmp_path)
    same = Training(net(2, 3, 4))
    same.schedulers = [torch.optim.lr_scheduler.StepLR(same.optimizers[0], 5)]
    state = same.state_dict()
    chosen = select_fitting(saved, model=same.model.state_dict(), state=state)
    assert all(torch.equal(chosen.model[name], saved.model[name]) for name in saved.model)
    assert chosen.state["optimizers"] == saved.state["optimizers"]
    assert chosen.state["schedulers"] == saved.state["schedulers"]
    assert chosen.state["step"] == 7

    other = Training(net(2, 3, 5))  # a new head
    other.schedulers = [torch.optim.lr_scheduler.ConstantLR(other.optimizers[0])]
    state = other.state_dict()
    chosen = select_fitting(saved, model=other.model.state_dict(), state=state)
    other.model.load_state_dict(chosen.model)
    other.optimizers[0].load_state_dict(chosen.state["optimizers"][0])
    assert torch.equal(other.model.state_dict()["0.weight"], saved.model["0.weight"])
    assert chosen.state["schedulers"] == state["schedulers"]
    other.step()  # the old moments have other shapes


def test_load_into_without_strict_loads_what_fits_and_lists_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Training(net(2, 3, 4, 5)).save(tmp_path / "checkpoints")
    (found,) = read_checkpoints(tmp_path / "checkpoints")[0]
    model = torch.compile(net(2, 3, 6))
    untouched = model.state_dict()["_orig_mod.1.weight"].clone()
    assert found.load_into(model, strict=False) is model
    assert torch.equal(model.state_dict()["_orig_mod.0.weight"], saved.model["0.weight"])
    assert torch.equal(model.state_dict()["_orig_mod.1.weight"], untouched)
    for words in (
        *("2 of 6 weights were loaded", "the model lacks '2.bias', '2.weight'"),
        "'_orig_mod.1.weight' is (4, 3) in the checkpoint and (6, 3) here",
    ):
        assert words in caplog.text
    caplog.clear()
    found.load_into(net(2, 3, 4, 5), strict=False)
    assert not caplog.records
