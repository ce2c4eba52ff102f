"""Trains with all trackers: `tracked_training.py FOLDER kill|resume`, in a process of its own.

With `kill`, the process dies after step 14; the newest checkpoint is that of step 10.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from hookline import Hook, Trainer, TrainerConfig

FOLDER, MODE = sys.argv[1:3]


class Watch(Hook):
    def on_step_end(self, trainer, step):
        import wandb

        trainer.log("own/step", float(step))
        if step == 10:
            trainer.log("own/weights", torch.arange(10.0), kind="histogram")
            trainer.log("own/note", "hello", kind="text")
            trainer.log("own/picture", torch.rand(3, 4, 5), kind="image")
            trainer.save_checkpoint()
        if step == 16:
            trainer.save_checkpoint()
        wandb.log({"beside": step})
        wandb.log({"beside_with_step": step * 2}, step=step)
        if MODE == "kill" and step == 14:
            self.die(trainer)

    def die(self, trainer):
        trainer.run.flush()
        end = time.monotonic() + 60
        threads = trainer._trackers._threads
        while time.monotonic() < end and any(
            thread.waiting or not thread.has_started.is_set() for thread in threads
        ):
            time.sleep(0.05)
        time.sleep(1.5)  # trackio writes twice a second
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(20)]
trainer = Trainer(
    TrainerConfig(seed=0, runs=FOLDER, progress="off", checkpoints={"background": False}),
    model,
    torch.optim.SGD(model.parameters(), 0.1),
    loss_fn=torch.nn.functional.mse_loss,
    hooks=[Watch()],
    hparams={"width": 4, "api_key": "sk-verysecret123"},
    name="tracked",
    trackers=[
        "tensorboard",
        *({"name": name, "checkpoints": True} for name in ("wandb", "mlflow", "trackio")),
    ],
)
resumed = next(Path(FOLDER).glob("*/checkpoints/step_000010")) if MODE == "resume" else None
trainer.fit(data, resume_from=resumed)
