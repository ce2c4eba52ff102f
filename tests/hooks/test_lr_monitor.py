"""LRMonitor: the rates that steps have used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loops
import torch
from loops import Net, batches, make

import hookline
from hookline.hooks.monitoring.lr_monitor import LRMonitor
from hookline.runs.jsonl_reader import read_records


def fit(
    folder: Path, *hooks: hookline.Hook, parts: Any = None, data: Any = None, **options: Any
) -> dict[str, list[tuple[int, Any]]]:
    """Train, and return the logged values by name: step and value."""
    model, optimizers = parts or (None, None)
    data = batches(3) if data is None else data
    trainer = loops.fit(
        *hooks, model=model, optimizers=optimizers, data=data, runs=folder, **options
    )
    assert trainer.hooks.summary().failures == {}
    values: dict[str, list[tuple[int, Any]]] = {}
    for one in read_records(trainer.run.path / "metrics.jsonl"):
        if not one["name"].startswith("train/"):
            values.setdefault(one["name"], []).append((one["step"], one["value"]))
    return values


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_each_steps_own_rate_is_logged_although_the_scheduler_has_stepped(tmp_path: Path) -> None:
    model, optimizer = make()
    values = fit(tmp_path, LRMonitor(), parts=(model, optimizer), schedulers=halved(optimizer))
    assert values == {"lr/SGD": [(1, 0.1), (2, 0.05), (3, 0.025)]}


def test_frequency_epoch_logs_what_the_last_step_of_an_epoch_used(tmp_path: Path) -> None:
    model, optimizer = make()
    values = fit(
        tmp_path,
        LRMonitor(frequency="epoch"),
        parts=(model, optimizer),
        schedulers=halved(optimizer),
        data=batches(2),
        max_epochs=2,
    )
    assert values == {"lr/SGD": [(2, 0.05), (4, 0.0125)]}


def test_momentum_and_weight_decay_are_logged_when_asked_for(tmp_path: Path) -> None:
    parts = make(momentum=0.9, weight_decay=0.01)
    values = fit(
        tmp_path,
        LRMonitor(log_momentum=True, log_weight_decay=True),
        parts=parts,
        data=batches(1),
    )
    assert values == {
        "lr/SGD": [(1, 0.1)],
        "momentum/SGD": [(1, 0.9)],
        "weight_decay/SGD": [(1, 0.01)],
    }


def test_several_groups_and_optimizers_have_names_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizers = [
        torch.optim.SGD([model.first.weight], lr=0.1),
        torch.optim.SGD(
            [{"params": [model.first.bias]}, {"params": [model.second.weight], "lr": 0.3}], lr=0.2
        ),
        torch.optim.Adam([model.second.bias], lr=0.4),
    ]
    values = fit(tmp_path, LRMonitor(), parts=(model, optimizers), data=batches(1))
    assert values == {
        "lr/SGD": [(1, 0.1)],
        "lr/SGD_2/group_0": [(1, 0.2)],
        "lr/SGD_2/group_1": [(1, 0.3)],
        "lr/Adam": [(1, 0.4)],
    }


def test_a_skipped_step_logs_nothing(tmp_path: Path) -> None:
    class SkipSecond(hookline.Hook):
        intervenes = True

        def on_gradients_ready(self, trainer: Any, batch_idx: int = 0, step: int = 0) -> None:
            if step == 1 and not self.done:
                self.done = True
                trainer.skip_optimizer_step()

        done = False

    assert fit(tmp_path, SkipSecond(), LRMonitor())["lr/SGD"] == [(1, 0.1), (2, 0.1)]


def test_a_rate_that_is_a_tensor_is_copied_and_not_read(tmp_path: Path) -> None:
    model, _ = make()
    rate = torch.tensor(0.5)
    adam = torch.optim.Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    logged: list[Any] = []

    class Stand:
        def log(self, name: str, value: Any) -> None:
            logged.append(value)

    monitor = LRMonitor()
    monitor.on_after_optimizer_step([adam], 0)
    rate.fill_(0.25)  # what schedulers do
    monitor.on_step_end(Stand(), 1)
    assert isinstance(logged[0], torch.Tensor)
    assert logged[0].item() == 0.5
    values = fit(
        tmp_path, LRMonitor(), parts=(model, adam), schedulers=halved(adam), data=batches(2)
    )
    assert values["lr/Adam"] == [(1, 0.25), (2, 0.125)]
