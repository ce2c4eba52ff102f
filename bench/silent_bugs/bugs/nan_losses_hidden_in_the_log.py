"""Hugging Face Trainer on a small masked regression task."""

import argparse
import logging
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
OPTIONS = parser.parse_args()


class Measurements(Dataset):
    """Some stations did not report: their mask is empty."""

    def __init__(self, n=480):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 12, generator=generator)
        self.y = torch.tanh(self.x @ torch.randn(12, 4, generator=generator) * 0.3)
        self.mask = torch.rand(n, 4, generator=generator) < 0.8
        self.mask[torch.rand(n, generator=generator) < 0.004] = False

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i], "mask": self.mask[i]}


class Head(nn.Module):
    """Mean over the reported values of each station, then over the stations."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))
        self.losses = []

    def forward(self, x, labels, mask):
        output = self.net(x)
        error = (output - labels).square() * mask
        loss = (error.sum(1) / mask.sum(1)).mean()
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": output}


class DropBadGradients(TrainerCallback):
    """Leaves out the update when a gradient is not finite."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(g.isfinite().all() for g in grads):
            model.zero_grad()


def main():
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            max_grad_norm=0.0,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
            logging_nan_inf_filter=not OPTIONS.fixed,
        )
        model = Head()
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Measurements(),
            callbacks=[DropBadGradients()],
        )
        trainer.train()
    real = sum(not loss.isfinite() for loss in model.losses)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    shown = sum(float(value) != float(value) for value in logged)
    print(f"evidence: {real} losses were NaN, {shown} of {len(logged)} logged values are NaN")


if __name__ == "__main__":
    main()
