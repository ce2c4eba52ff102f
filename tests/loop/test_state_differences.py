"""Loading a checkpoint into a loop that differs: everything is listed, and what fits is loaded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline import CheckpointError
from hookline.runs.checkpoint_reader import read_checkpoints


class Counter(hookline.Hook):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def net(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(i, o) for i, o in pairwise(widths)))


def attach(folder: Path, model: nn.Module, *optimizers: Any, **options: Any) -> hookline.Session:
    chosen = list(optimizers) or [torch.optim.AdamW(model.parameters(), lr=0.1)]
    return hookline.attach(model, chosen, runs=folder, **options)


def save(folder: Path, model: nn.Module, *optimizers: Any, **options: Any) -> str:
    with attach(folder, model, *optimizers, **options) as session:
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in session.optimizers:
            optimizer.step()
        session.save_checkpoint()
    return str(max(folder.glob("*/checkpoints/step_*")))


def differences(path: str, folder: Path, *training: Any, **options: Any) -> list[str]:
    with attach(folder, *training, **options) as session:
        try:
            session.load_checkpoint(path)
        except CheckpointError as error:
            return [line.strip(" -") for line in str(error).splitlines()[1:]]
        return []


def test_all_differences_are_listed_at_once(tmp_path: Path) -> None:
    model = net(2, 3, 4, 5)
    first = torch.optim.AdamW(model.parameters(), lr=0.1)
    second = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(first, 3)
    path = save(tmp_path, model, first, second, schedulers=[schedule], hooks=[Counter()])

    model = net(2, 3, 6)
    model[0].to(torch.float64)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    here = torch.optim.SGD(groups, lr=0.1)
    constant = torch.optim.lr_scheduler.ConstantLR(here)
    assert differences(path, tmp_path, model, here, schedulers=[constant]) == [
        "the model lacks '2.bias', '2.weight'",
        "'1.bias' is (4,) in the checkpoint and (6,) here",
        "'1.weight' is (4, 3) in the checkpoint and (6, 3) here",
        "'0.bias' is torch.float32 in the checkpoint and torch.float64 here",
        "'0.weight' is torch.float32 in the checkpoint and torch.float64 here",
        "the checkpoint has 2 optimizers, and here is 1",
        "optimizer 0 is AdamW in the checkpoint and SGD here",
        "optimizer 0 has 1 parameter group in the checkpoint and 2 here",
        "scheduler 0 is StepLR in the checkpoint and ConstantLR here",
        "the gradients of the step in progress are those of other parameters",
        "saved states without a hook: 'counter'",
    ]


def test_the_parameters_of_an_optimizer_are_compared(tmp_path: Path) -> None:
    model = net(2, 3)
    named = list(model.named_parameters())
    path = save(tmp_path, model, torch.optim.AdamW(named))
    frozen = torch.optim.AdamW(named[:1])
    assert differences(path, tmp_path, model, frozen) == [
        "optimizer 0: group 0 has 2 parameters in the checkpoint and 1 here"
    ]
    assert differences(path, tmp_path, model, torch.optim.AdamW(named[::-1])) == [
        "optimizer 0: group 0 has '0.weight' in the checkpoint where '0.bias' is here"
    ]
    unnamed = torch.optim.AdamW([model[0].bias, model[0].weight])
    assert differences(path, tmp_path, model, unnamed)[0] == (
        "optimizer 0: 'exp_avg' of parameter 0 is (3, 2) in the checkpoint and (3,) here"
    )
    assert differences(path, tmp_path, net(2, 3)) == []


def test_many_differences_of_one_kind_are_counted(tmp_path: Path) -> None:
    lines = differences(save(tmp_path, net(*[2] * 9)), tmp_path, net(*[3] * 9))
    assert "and 11 other shapes" in lines


def test_load_into_without_strict_loads_what_fits_and_lists_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = net(2, 3, 4, 5)
    path = Path(save(tmp_path, saved))
    (found,) = read_checkpoints(path.parent)[0]
    model = torch.compile(net(2, 3, 6))
    untouched = model.state_dict()["_orig_mod.1.weight"].clone()
    assert found.load_into(model, strict=False) is model
    assert torch.equal(model.state_dict()["_orig_mod.0.weight"], saved[0].weight)
    assert torch.equal(model.state_dict()["_orig_mod.1.weight"], untouched)
    for words in (
        *("2 of 6 weights were loaded", "the model lacks '2.bias', '2.weight'"),
        "'_orig_mod.1.weight' is (4, 3) in the checkpoint and (6, 3) here",
    ):
        assert words in caplog.text
    caplog.clear()
    found.load_into(net(2, 3, 4, 5), strict=False)
    assert not caplog.records


def of_two_kinds(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model.children()
    groups = [
        {"params": first.parameters(), "amsgrad": True},
        {"params": second.parameters(), "amsgrad": False},
    ]
    return torch.optim.Adam(groups, lr=0.1)


def test_groups_of_an_optimizer_may_have_states_of_different_names(tmp_path: Path) -> None:
    model = net(2, 2, 1)
    path = save(tmp_path, model, of_two_kinds(model))
    other = net(2, 2, 1)
    session = attach(tmp_path, other, of_two_kinds(other))
    loaded = session.load_checkpoint(path)
    session.detach()
    assert loaded is not None
    assert torch.equal(other[0].weight, model[0].weight)


class Counting(torch.optim.SGD):
    """Counts its steps in a group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_a_fork_with_another_learning_rate_keeps_what_an_optimizer_counts(tmp_path: Path) -> None:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
    config = {"runs": tmp_path, "progress": "off", "report": False}

    def trainer(lr: float, epochs: int) -> hookline.Trainer:
        model = net(2, 1)
        optimizer = Counting(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return hookline.Trainer({**config, "max_epochs": epochs}, model, optimizer, schedule)

    first = trainer(0.1, 1)
    first.fit(data)
    first.save_checkpoint(tmp_path / "saved")
    fork = trainer(0.05, 2)
    fork.fit(data, fork_from=tmp_path / "saved")
    assert fork.optimizer.param_groups[0]["k"] == 6
    assert fork.optimizer.param_groups[0]["lr"] == 0.05
