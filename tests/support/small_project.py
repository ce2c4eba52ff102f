"""A project with a config file, as a user would write it."""

from __future__ import annotations

PROJECT = """
import os, time, torch
from torch import nn
import hookline

class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)
    def forward(self, x):
        return self.second(self.first(x))

def batches(count: int = 4):
    return [(torch.ones(2, 8), torch.ones(2, 4)) for _ in range(count)]

class Saves(hookline.Hook):
    def on_step_end(self, trainer, step):
        import late  # found while it trains, too
        if step == 2:
            trainer.save_checkpoint()
        while step == 4 and os.environ.get("WAITS") and not os.path.exists("go"):
            time.sleep(0.01)

def make_trainer(lr=0.1, steps=3):
    model = Net()
    return hookline.get_trainer(
        "simple", model, batches(), torch.optim.SGD(model.parameters(), lr=lr), max_steps=steps,
    )
"""


TRAINING = """\
seed: 0
model: {class_path: net.Net, init_args: {width: 3}}
data: {train: net.batches, val: net.batches}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 2}
hooks: [net.Saves, {name: early_stopping, patience: 9, enabled: false}]
"""
