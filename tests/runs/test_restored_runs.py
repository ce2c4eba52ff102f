"""Forks: a new run from a checkpoint of another one, with changed settings."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net, batches, same, weights
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import CheckpointError, Trainer, TrainerConfig
from hookline.trainer.lifecycle import requeue_slurm_job


class Saves(hookline.Hook):
    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step in self.steps:
            trainer.save_checkpoint()


def shuffled(size: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4]), batch_size=batch_size, shuffle=True)


def make(
    tmp_path: Path,
    *hooks: hookline.Hook,
    scheduler: Any = None,
    model: type[nn.Module] = Net,
    optimizer: Any = torch.optim.AdamW,
    lr: float = 0.01,
    options: Any = None,
    **fields: Any,
) -> Trainer:
    torch.manual_seed(0)
    net = model()
    own = optimizer(net.parameters(), lr=lr, **(options or {}))
    schedulers = None if scheduler is None else scheduler(own)
    fields = {"max_epochs": 2, "seed": 3, "runs": tmp_path / "runs", "progress": "off"} | fields
    config = TrainerConfig(**{n: v for n, v in fields.items() if v != "unset"})
    return Trainer(config, net, own, schedulers, hooks=hooks)


def lr_of(trainer: Trainer) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def test_a_url_to_fork_from_is_named_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="s3://bucket/run is a URL"):
        make(tmp_path).fit(shuffled(), fork_from="s3://bucket/run")


def test_changed_hyperparameters_win_and_all_else_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = make(tmp_path, Saves(4), options={"betas": (0.9, 0.99)}).fit(shuffled())
    state = parent.optimizers[0].state_dict()["state"][0]
    seen: dict[str, Any] = {}

    class Look(hookline.Hook):
        def on_checkpoint_load(self, trainer: Any, optimizer: Any) -> None:
            seen.update(optimizer.param_groups[0], step=trainer.step)
            seen["moment"] = optimizer.state_dict()["state"][0]["step"].item()

    caplog.set_level(logging.INFO, "hookline")
    fork = make(tmp_path, Look(), lr=0.5, options={"weight_decay": 0.3, "betas": (0.9, 0.99)})
    fork.fit(shuffled(), fork_from=parent.run.path)
    assert (seen["lr"], seen["weight_decay"], seen["betas"]) == (0.5, 0.3, (0.9, 0.99))
    assert (seen["step"], seen["moment"]) == (4, 4)
    assert state["step"].item() == 12
    (message,) = [r.getMessage() for r in caplog.records if "New settings" in r.getMessage()]
    assert message.splitlines()[1:] == [
        "  optimizers.0.groups.0.lr is 0.5 instead of 0.01",
        "  optimizers.0.groups.0.weight_decay is 0.3 instead of 0.01",
    ]


SCHEDULES: dict[str, Any] = {
    "step": lambda o: StepLR(o, 2, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 12),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 3), ExponentialLR(o, 0.9)], [3]),
    "one cycle": lambda o: OneCycleLR(o, 0.1, 24),
}


def halve(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, 0.5)


# The settings of the run and of its fork.
FORKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"a changed lr: {name}": ({"scheduler": one}, {"scheduler": one, "lr": 0.04})
        for name, one in SCHEDULES.items()
    },
    "a longer one": (
        {"scheduler": lambda o: CosineAnnealingLR(o, 6)},
        {"scheduler": lambda o: CosineAnnealingLR(o, 12)},
    ),
    "added": ({}, {"scheduler": SCHEDULES["step"]}),
    "replaced": ({"scheduler": SCHEDULES["cosine"]}, {"scheduler": SCHEDULES["step"]}),
    "removed": ({"scheduler": SCHEDULES["cosine"]}, {}),
    "another unit": ({"scheduler": halve}, {"scheduler": halve, "scheduler_every": "epoch"}),
}


@pytest.mark.parametrize("name", FORKS)
def test_a_changed_schedule_is_as_if_it_had_been_so_from_the_start(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, now = ({"scheduler_every": "step"} | fields for fields in FORKS[name])
    parent = make(tmp_path, Saves(6), **before).fit(shuffled())
    caplog.set_level(logging.INFO, "hookline")
    fork = make(tmp_path, **now).fit(shuffled(), fork_from=parent.run.path)
    assert ("schedulers.0.T_max is 12 instead of 6" in caplog.text) == (name == "a longer one")
    other = make(tmp_path, **now).fit(shuffled())
    assert lr_of(fork) == pytest.approx(lr_of(other), rel=1e-9)
    manifest = hookline.open_run(fork.run.path).manifest["training"]
    assert manifest["optimizers"] == other.run.manifest["training"]["optimizers"]


def test_plateau_keeps_its_position_and_takes_new_arguments(tmp_path: Path) -> None:
    def plateau(patience: int) -> Any:
        return lambda o: ReduceLROnPlateau(o, patience=patience, factor=0.5, threshold=10.0)

    parent = make(tmp_path, scheduler=plateau(0), max_epochs=3)
    parent.add_checkpointing()
    parent.fit(shuffled(), batches(2))
    assert lr_of(parent) < 0.01
    fork = make(tmp_path, scheduler=plateau(5), lr=0.1, max_epochs=4)
    fork.fit(shuffled(), batches(2), fork_from=parent.run.path)
    assert lr_of(fork) == 0.1
    assert fork.schedulers[0].patience == 5
    assert fork.schedulers[0].last_epoch == 4
    fork = make(tmp_path, scheduler=plateau(5), max_epochs=4)
    fork.fit(shuffled(), batches(2), fork_from=parent.run.path)
    assert lr_of(fork) == lr_of(parent)


def test_what_cannot_be_applied_is_refused(tmp_path: Path) -> None:
    parent = make(tmp_path, Saves(4), scheduler=SCHEDULES["one cycle"], scheduler_every="step")
    parent.fit(shuffled())
    short = make(tmp_path, scheduler=lambda o: OneCycleLR(o, 0.1, 3), scheduler_every="step")
    with pytest.raises(CheckpointError, match="Tried to step 4 times"):
        short.fit(shuffled(), fork_from=parent.run.path)
    over = make(tmp_path, max_steps=4, scheduler=SCHEDULES["one cycle"], scheduler_every="step")
    with pytest.raises(CheckpointError, match=r"step 4 .* max_steps is 4\. Set a larger"):
        over.fit(shuffled(), fork_from=parent.run.path)
    with pytest.raises(TypeError, match="both resume_from"):
        over.fit(shuffled(), fork_from=parent.run.path, resume_from=parent.run.path)


def test_another_model_or_optimizer_is_an_error_with_all_differences(tmp_path: Path) -> None:
    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.third = nn.Linear(8, 17), nn.Linear(17, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.first(x))

    parent = make(tmp_path, Saves(4)).fit(shuffled())
    fork = make(tmp_path, model=Wider, optimizer=torch.optim.SGD)
    before = weights(fork.model)
    with pytest.raises(CheckpointError) as caught:
        fork.fit(shuffled(), fork_from=parent.run.path)
    text = str(caught.value)
    for line in (
        "the checkpoint lacks 'third.weight', 'third.bias'",
        "'first.weight' is (16, 8) in the checkpoint and (17, 8) here",
        "optimizer 0 is AdamW in the checkpoint and SGD here",
    ):
        assert line in text
    assert same(before, weights(fork.model))


def test_other_data_restarts_the_epoch_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = make(tmp_path, Saves(8)).fit(shuffled())
    fork = make(tmp_path).fit(shuffled(size=40), fork_from=parent.run.path)
    assert "epoch 1 starts again, with the new data" in caplog.text
    assert fork.step == 8 + 10  # one epoch of the new data
    two = make(tmp_path).fit({"a": shuffled(), "b": shuffled()}, fork_from=parent.run.path)
    assert two.step == 8 + 12


def test_a_changed_seed_gives_other_random_numbers_from_the_same_state(tmp_path: Path) -> None:
    parent = make(tmp_path, Saves(6)).fit(shuffled())
    forks = [
        make(tmp_path, seed=seed, max_epochs=3).fit(shuffled(), fork_from=parent.run.path)
        for seed in (3, 4, 4, 5)
    ]
    results = [weights(fork.model) for fork in forks]
    assert same(results[1], results[2])
    assert not same(results[0], results[1])
    assert not same(results[1], results[3])


def test_a_fork_removes_no_checkpoint_of_its_parent(tmp_path: Path) -> None:
    def hook() -> hookline.Hook:
        return hookline.ModelCheckpoint(
            folder=tmp_path / "shared", monitor="train/loss", save_top_k=1
        )

    parent = make(tmp_path, hook()).fit(shuffled())
    kept = sorted(path.name for path in (tmp_path / "shared").iterdir() if path.is_dir())
    (checkpoint,) = kept
    make(tmp_path, hook(), max_epochs=6).fit(shuffled(), fork_from=tmp_path / "shared" / checkpoint)
    assert checkpoint in {path.name for path in (tmp_path / "shared").iterdir()}
    assert parent.step == 12


def test_a_checkpoint_without_its_run_is_compared_with_its_own_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cosine = SCHEDULES["cosine"]
    parent = make(tmp_path, Saves(7), scheduler=cosine, scheduler_every="step").fit(shuffled())
    alone = tmp_path / "alone"
    (parent.run.path / "checkpoints" / "step_000007").rename(alone)
    caplog.set_level(logging.INFO, "hookline")
    fields = {"scheduler": cosine, "scheduler_every": "step", "options": {"weight_decay": 0.2}}
    fork = make(tmp_path, **fields).fit(shuffled(), fork_from=alone)
    assert fork.run.manifest["parent"]["run_id"] == parent.run.id
    assert lr_of(fork) == pytest.approx(lr_of(parent))
    assert "weight_decay is 0.2 instead of 0.01" in caplog.text
    assert "lr is" not in caplog.text


# -- requeueing ------------------------------------------------------------------------------------


def install_scontrol(folder: Path, code: int) -> Path:
    folder.mkdir()
    script = folder / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/called\necho refused >&2\nexit {code}\n')
    script.chmod(0o755)
    return folder


def test_a_slurm_job_is_requeued_and_a_failure_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = install_scontrol(tmp_path / "a", 0), install_scontrol(tmp_path / "b", 1)
    monkeypatch.setenv("PATH", str(good) + os.pathsep + os.environ["PATH"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert not requeue_slurm_job()
    assert not (good / "called").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert requeue_slurm_job()
    assert (good / "called").read_text() == "requeue 4711\n"
    assert not caplog.records
    monkeypatch.setenv("PATH", str(bad) + os.pathsep + os.environ["PATH"])
    assert not requeue_slurm_job()
    assert "The Slurm job 4711 could not be requeued" in caplog.text
    assert "refused" in caplog.text
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    caplog.clear()
    assert not requeue_slurm_job()
    assert "No such file" in caplog.text
