"""One set of hooks for every loop, and what they see there: compared by `test_conformance.py`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from every_loop import Head
from torch import nn

import hookline
from hookline.events import EVENTS

Loop = Callable[[list[Any], Path], tuple[nn.Module, Any]]
"""Trains with hooks, and writes a run into a folder; returns the model and the session."""

WRITTEN = {"log.jsonl", "uploaded", "heartbeat"}
"""Metrics that built-in hooks write beside the run."""

RECORDS = ("train/loss", "val/loss", "gradients/total/norm", "optimizer/total/update_ratio")
"""Metrics that are compared in the run's record."""

NOISE = "gradient_noise/variance"
"""Metrics that are compared in one process: several have smaller micro-batches."""


def is_main() -> bool:
    """Return whether this process writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def make_recorder(missing: Collection[str]) -> Any:
    """Return a hook with a method for every event that is not missing; it notes what it gets."""

    class Recorder(hookline.Hook):
        def __init__(self) -> None:
            self.events: list[str] = []
            self.values: dict[str, list[float]] = {}

        def note(self, name: str, value: Any) -> None:
            self.values.setdefault(name, []).append(float(value))

        def on_train_batch_end(self, batch_idx, loss, epoch):
            self.events.append(f"on_train_batch_end {epoch}.{batch_idx}")
            self.note("batch loss", loss)

        def on_gradients_ready(self, model):
            self.events.append("on_gradients_ready")
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                gradient = hookline.full_tensor(parameter.grad)
                own_name = name.removeprefix("module.").removeprefix("net.")
                self.note(f"gradient of {own_name}", gradient.norm())

        def on_gradient_clip(self, grad_norm):
            self.events.append("on_gradient_clip")
            self.note("norm", grad_norm)

        def on_step_end(self, step, loss, grad_norm, lr):
            self.events.append(f"on_step_end {step}")
            for name, value in (("loss", loss), ("step norm", grad_norm), ("lr", lr)):
                self.note(name, value)

        def on_validation_end(self, metrics):
            self.events.append("on_validation_end")
            self.note("val/loss", metrics["val/loss"])

        def on_epoch_end(self, epoch, metrics):
            self.events.append(f"on_epoch_end {epoch}")
            self.note("train/loss", metrics["train/loss"])
            self.note("val/loss at the end", metrics["val/loss"])

        def on_train_end(self, status):
            self.events.append(f"on_train_end {status}")

    def add(event: str) -> None:
        def method(self: Recorder) -> None:
            self.events.append(event)

        method.__name__ = event
        setattr(Recorder, event, method)

    for event in EVENTS:
        if event not in vars(Recorder) and event not in missing:
            add(event)
    return Recorder()


class TakesTrainer(hookline.TrainerHooks):
    """Methods that take the trainer first."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name):
        self.seen.append((batch_idx, dataloader_idx, dataloader_name))

    def on_validation_end(self, trainer, epoch, metrics):
        self.seen.append(epoch)


class TakesState(hookline.TrainingHook):
    """A name, and methods that take a state."""

    def __init__(self) -> None:
        super().__init__("ticker")
        self.seen: list[Any] = []

    def on_train_begin(self, state):
        self.seen.append(state["device"].type)

    def on_batch_end(self, batch_idx, loss, state):
        self.seen.append((state["current_epoch"], batch_idx))

    def on_train_end(self, state):
        self.seen.append(state["status"])


class TakesActivations(hookline.ForwardHook):
    """An observer of outputs."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, activations, step):
        self.seen.append(step)


class TakesContext(hookline.TrainingHook):
    """A context of the step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, ctx):
        self.seen.append(ctx.step)


class Failing(hookline.Hook):
    def on_step_end(self):
        raise ValueError("a hook failed")


class Toggling(hookline.Hook):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, trainer, step):
        self.seen.append(step)
        if step == 3:
            trainer.hooks.disable_hook("toggling")


class StopsAlone(hookline.Hook):
    """Asks to stop in the last process only."""

    def on_step_end(self, trainer, step):
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            trainer.stop("one process asked")


class SignalsAlone(hookline.Hook):
    """Sends SIGTERM to the last process only."""

    def on_step_end(self, step):
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class HalveHead(hookline.UpdateHook):
    """Halves the gradients of one layer: clipping would undo halving all of them."""

    def __call__(self, gradients):
        return {name: value / 2 for name, value in gradients.items() if "head." in name}


class Norms(hookline.Hook):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, grad_norm):
        self.seen.append(grad_norm)


def built_ins(folder: Path, webhook: str, loop: str = "trainer") -> list[Any]:
    """Return all built-in hooks that a loop of this name does not refuse."""
    hooks = [
        hookline.GradientMonitor(log_frequency=2),
        hookline.OptimizerMonitor(log_frequency=2),
        hookline.GradientNoiseScale(log_frequency=2),
        hookline.AttentionMonitor(Head, log_frequency=2),  # which has no attention: it says so
        hookline.OutlierMonitor(log_frequency=2),
        hookline.LogitMonitor(log_frequency=2, class_dim=0),
        hookline.Sharpness(log_frequency=2),
        hookline.LossSpikeDetector(window=4, min_steps=4),
        hookline.LRMonitor(),
        hookline.ActivationStats(log_interval=2),
        hookline.LoggingHook(),
        hookline.ConsoleLogHook(),
        hookline.JSONLogHook(path=str(folder / "log.jsonl")),
        hookline.DebugHook(),
        hookline.Lint(),
        hookline.EMA(decay=0.5),
        hookline.EarlyStopping(monitor="val/loss", patience=5),
        hookline.TimeLimit("10h"),
        hookline.ModelCheckpoint(monitor="val/loss", save_top_k=1),
        hookline.CheckpointHook(),
        hookline.UploadHook(folder / "uploaded"),
        hookline.Heartbeat(path=folder / "heartbeat"),
        hookline.NotificationHook(webhook_url=webhook),
    ]
    return [hook for hook in hooks if type(hook) not in refused_in(loop)]


def refused_in(loop: str) -> set[type]:
    """Return the built-in hooks that raise an error in a loop of this name."""
    refused = set()
    if "trainer" not in loop:
        refused.add(hookline.Sharpness)  # other loops cannot compute the loss of a batch again
    if "fsdp" in loop:
        refused |= {hookline.Sharpness, hookline.GradientNoiseScale}
    return refused


class Webhook(BaseHTTPRequestHandler):
    """Receives notifications."""

    received: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def webhook() -> Iterator[str]:
    """Serve a webhook; gives its address."""
    Webhook.received.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def run(
    loop: Loop,
    folder: Path,
    *more: Any,
    name: str = "trainer",
    missing: Collection[str] = frozenset(),
) -> dict[str, Any]:
    """Train in the loop of this name with all kinds of hooks, and more; return what they saw."""
    folder.mkdir(exist_ok=True)
    recorder, toggling = make_recorder(missing), Toggling()
    dialects = [TakesTrainer(), TakesState(), TakesActivations(), TakesContext()]
    capture = hookline.probes.Capture(Head)
    with webhook() as url:
        own = [recorder, *dialects, Failing(), toggling, capture]
        model, session = loop([*own, *built_ins(folder, url, name), *more], folder)
    described = session.hooks.describe()
    return {
        "events": recorder.events,
        "values": recorder.values,
        "dialects": {type(hook).__name__: hook.seen for hook in dialects},
        "toggled": toggling.seen,
        "captured": capture.counts.captured,
        "failed": {info.name: info.failures for info in described if info.failures},
        "weights": read_weights(model),
        "status": session.status,
        **(describe_files(session.run.path, folder) if is_main() else {}),
        "notifications": len(Webhook.received),
    }


def read_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a model, also one whose parameters are sharded."""
    found = hookline.full_tensor(model.state_dict())
    return {name.removeprefix("module."): value.clone() for name, value in found.items()}


def describe_files(run_folder: Path, folder: Path) -> dict[str, Any]:
    """Return what the run has recorded, and what hooks have written."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    records = {
        name: [(r["step"], r["value"]) for r in found if r["name"] == name]
        for name in (*RECORDS, NOISE)
    }
    return {
        "records": {name: records[name] for name in RECORDS},
        "noise": records[NOISE],
        "recorded status": json.loads((run_folder / "manifest.json").read_text())["status"],
        "saved": sorted(path.name for path in (run_folder / "checkpoints").iterdir()),
        "written": sorted(path.name for path in folder.iterdir() if path.name in WRITTEN),
    }
