"""Trains beside the program's own use of trackers: `tracked_beside.py FOLDER`.

It writes what each tool's own reader reads to `read.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mlflow
import torch
import wandb
from mlflow.tracking import MlflowClient
from wandb_files import read_history

import hookline
from hookline import Hook, Trainer, TrainerConfig
from hookline.runs.run import Run

FOLDER = Path(sys.argv[1])
DATA = [(torch.ones(1, 2), torch.ones(1, 1))] * 4


class OwnMetric(Hook):
    def on_step_end(self, step):
        mlflow.log_metric("own", float(step), step=step)


def fit(runs, hooks, trackers):
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(
        TrainerConfig(runs=runs, progress="off"),
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=torch.nn.functional.mse_loss,
        hooks=hooks,
        trackers=trackers,
    )
    trainer.fit(DATA)
    return trainer.run.path


class Loop:
    """A bare loop that is tracked by W&B."""

    def __init__(self, name):
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.session = hookline.attach(
            self.model, self.optimizer, trackers=["wandb"], runs=FOLDER / name
        )
        self.session.__enter__()

    def step(self):
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self):
        self.session.__exit__(None, None, None)


def read_rows(folder, names=("train/loss", "own", "late")):
    """Return the names in each row of W&B's history, with our step."""
    return [
        [row.get("hookline_step"), *(name for name in names if name in row)]
        for row in read_history(folder)
    ]


def loops_at_the_same_time():
    first, second = Loop("first"), Loop("second")
    for step in range(3):
        first.step()
        second.step()
        wandb.log({"own": step}, step=step)
    first.end()
    second.step()
    second.end()
    return {}


def run_of_the_program():
    folder = FOLDER / "program"
    folder.mkdir()
    run = wandb.init(project="mine", dir=str(folder))
    loops = [Loop("third"), Loop("fourth")]
    for loop in loops:
        loop.step()
    wandb.log({"own": 1})
    for loop in loops:
        loop.end()
    wandb.log({"late": 1})
    is_active = wandb.run is run
    run.finish()
    ids = [
        Run.open(next((FOLDER / name).iterdir())).manifest["trackers"]["wandb"]["id"]
        for name in ("third", "fourth")
    ]
    return {"active": is_active, "ids": [one == run.id for one in ids]}


def active_mlflow_run():
    mlflow.set_tracking_uri(f"sqlite:///{FOLDER / 'own.db'}")
    mlflow.create_experiment("mine", (FOLDER / "artifacts").as_uri())
    mlflow.set_experiment("mine")
    with mlflow.start_run() as active:
        mlflow.log_param("seed", "5")
        fit(FOLDER / "active", [OwnMetric()], ["mlflow"])
        status = MlflowClient().get_run(active.info.run_id).info.status
    (run,) = MlflowClient().search_runs([active.info.experiment_id])
    mlflow.set_tracking_uri(None)
    return {
        "same": run.info.run_id == active.info.run_id,
        "status": status,
        "params": [run.data.params["seed"], run.data.params["max_epochs"]],
        "metrics": run.data.metrics,
    }


if __name__ == "__main__":
    os.chdir(FOLDER)
    read = {
        function.__name__: function()
        for function in (
            active_mlflow_run,
            loops_at_the_same_time,
            run_of_the_program,
        )
    }
    wandb.teardown()  # its process may write until then
    for name in ("first", "second"):
        read["loops_at_the_same_time"][name] = read_rows(next((FOLDER / name).iterdir()))
    read["run_of_the_program"]["rows"] = read_rows(FOLDER / "program")
    (FOLDER / "read.json").write_text(json.dumps(read))
