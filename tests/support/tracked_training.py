"""Trains with all trackers: `tracked_training.py FOLDER`, in a process of its own.

A forked process trains and is killed after step 14; the newest checkpoint is that of step 10. Then
the run is resumed, and what MLflow and trackio have is written to `read.json`. Another training, in
`raised`, is interrupted in step 14 and resumed, with W&B only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from hookline import Hook, Trainer, TrainerConfig
from hookline.runs.run import Run

FOLDER = Path(sys.argv[1])


ODD = {
    "odd/nan": float("nan"),
    "odd/infinity": float("inf"),
    "odd/integer": 10**350,
    "odd/complex": 1 + 2j,
    "odd/*/stars*": 1.0,
    "odd/a@b": 2.0,
    "odd/a#b": 3.0,
    "odd/" + "n" * 300: 4.0,
    "odd/cuda:0 \u00e9": 5.0,
    "hookline_step": 6.0,
    "../up": 8.0,
}
ODD_HPARAMS = {"": 1, "_own": 2, "long": "v" * 9000, "x@y": 1, "x#y": 2, "list": [1, [2]]}


class Watch(Hook):
    def __init__(self, crash):
        self.crash = crash

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
            for name, value in ODD.items():
                trainer.log(name, value)
            trainer.log("odd/surrogate", "a\ud800b", kind="text")
            trainer.log("odd/empty", torch.empty(0), kind="histogram")
            trainer.log("odd/shape", torch.rand(4), kind="image")
            lost = trainer.run.path / "media" / "odd-lost-16.png"
            trainer.log("odd/lost", torch.rand(2, 2), kind="image")
            lost.unlink()
        wandb.log({"beside": step})
        wandb.log({"beside_with_step": step * 2}, step=step)
        if self.crash is not None and step == 14:
            self.crash(trainer)


def die(trainer):
    trainer.run.flush()
    end = time.monotonic() + 60
    threads = trainer._trackers._threads
    while time.monotonic() < end and any(
        thread.waiting or not thread.has_started.is_set() for thread in threads
    ):
        time.sleep(0.05)
    time.sleep(2)  # trackio writes twice a second
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(trainer):
    raise KeyboardInterrupt


def train(folder, trackers, crash=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(20)]
    trainer = Trainer(
        TrainerConfig(seed=0, runs=folder, progress="off", checkpoints={"background": False}),
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=torch.nn.functional.mse_loss,
        hooks=[Watch(crash)],
        hparams={"width": 4, "api_key": "sk-verysecret123", **ODD_HPARAMS},
        name="tracked",
        tags=["first", "second"],
        trackers=trackers,
    )
    trainer.fit(data, resume_from=next(folder.glob("*/checkpoints/step_000010"), None))


def read_mlflow(folder):
    """Return what MLflow's own client reads."""
    from mlflow.tracking import MlflowClient

    ids = Run.open(folder).manifest["trackers"]["mlflow"]
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([ids["experiment_id"]])
    run_id = run.info.run_id
    folders = ("text/own/note", "histograms/own/weights", "hookline", "checkpoints", "images")
    (image,) = (
        path for one in client.list_artifacts(run_id, "images") if (path := one.path)[-4:] == ".png"
    )
    size = Path(client.download_artifacts(run_id, image)).stat().st_size
    note = client.download_artifacts(run_id, "text/own/note/step_000010.txt")
    return {
        "ids": ids,
        "run_id": run_id,
        "status": run.info.status,
        "params": run.data.params,
        "tags": run.data.tags,
        "metrics": {
            name: [[m.step, m.value, m.timestamp] for m in client.get_metric_history(run_id, name)]
            for name in run.data.metrics
        },
        "artifacts": [a.path for one in folders for a in client.list_artifacts(run_id, one)],
        "note": Path(note).read_text(),
        "image": [image, size],
    }


def read_trackio():
    """Return what trackio's own reader reads."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("hookline")
    logs = SQLiteStorage.get_logs("hookline", run.name)
    return {"name": run.name, "config": run.config, "rows": logs}


def train_and_die(trackers):
    """Train in a forked process, which need not import everything, until it is killed."""
    pid = os.fork()
    if pid == 0:
        train(FOLDER / "runs", trackers, die)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


if __name__ == "__main__":
    names = ("wandb", "mlflow", "trackio")
    for name in names:
        import_module(name)
    trackers = ["tensorboard", *({"name": name, "checkpoints": True} for name in names)]
    train_and_die(trackers)
    train(FOLDER / "runs", trackers)
    (tracked,) = (FOLDER / "runs").iterdir()
    read = {"mlflow": read_mlflow(tracked), "trackio": read_trackio()}
    (FOLDER / "read.json").write_text(json.dumps(read))
    try:
        train(FOLDER / "raised", ["wandb"], interrupt)
    except KeyboardInterrupt:
        train(FOLDER / "raised", ["wandb"])
