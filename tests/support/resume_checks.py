"""Trainings that are saved, resumed and compared with the uninterrupted run."""

from __future__ import annotations

import torch
from loops import Net, same, weights
from torch.utils.data import TensorDataset

import hookline
from hookline import Trainer, TrainerConfig


class SaveAt(hookline.Hook):
    """Save a checkpoint in one event of one step."""

    def __init__(self, step, event="on_step_end"):
        self.at, self.event = step, event

    def on_step_end(self, trainer, step):
        if step == self.at and self.event == "on_step_end":
            trainer.save_checkpoint()

    def on_epoch_end(self, trainer, step):
        if step == self.at and self.event == "on_epoch_end":
            trainer.save_checkpoint()

    def on_before_optimizer_step(self, trainer, step):
        if step == self.at - 1 and self.event == "on_before_optimizer_step":
            trainer.save_checkpoint()


def dataset(samples=24, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 8, generator=generator), torch.randn(samples, 4)
    return TensorDataset(x, y * 0 + x[:, :4])


def train(tmp_path, loaders, fields, hooks=(), optimizers=1, resume_from=None):
    torch.manual_seed(0)
    model = Net()
    parts = (
        [model.parameters()]
        if optimizers == 1
        else [m.parameters() for m in (model.first, model.second)]
    )
    config = {"runs": tmp_path / "runs", "progress": "off", "max_epochs": 2, "seed": 7, **fields}
    trainer = Trainer(
        TrainerConfig(**config),
        model,
        [torch.optim.AdamW(p, lr=0.01) for p in parts],
        hooks=list(hooks),
    )
    trainer.fit(loaders, resume_from=resume_from)
    return trainer


def resume_equals(
    tmp_path,
    make_loaders,
    at,
    event="on_step_end",
    optimizers=1,
    make_other_loaders=None,
    **fields,
):
    """Whether a run that is resumed from step `at` ends with the weights of the whole run."""
    hooks = [SaveAt(at, event)]
    whole = train(tmp_path, make_loaders(), fields, hooks, optimizers)
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    torch.manual_seed(99)  # whatever happened since
    loaders = (make_other_loaders or make_loaders)()
    resumed = train(tmp_path, loaders, fields, (), optimizers, saved)
    assert resumed.step == whole.step
    return same(weights(resumed.model), weights(whole.model))
