"""The same hooks in every loop: the same events, gradients, metrics and weights as in the trainer.

What differs is named here, with the reason. Sums of gradients are formed in another order where a
loop divides the loss elsewhere, so numbers agree within 1e-5.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch
from hosts import LOOPS

import hookline
from hookline.errors import NotSuppliedError
from hookline.events import EVENTS

logging.getLogger("transformers").setLevel(logging.ERROR)


MISSING = {
    "transformers": {"on_before_backward"},
    "ignite": {"on_before_backward"},
    "accelerate loop": {"on_before_backward"},  # the Accelerator runs backward
}
"""Events that a loop does not give; hooks that need them are refused."""


WRITTEN = {"log.jsonl", "traces", "uploaded", "heartbeat"}
"""What built-in hooks write beside the run."""


def make_recorder(loop: str) -> Any:
    """Return a hook with a method for every event that notes what it was given."""

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
                self.note("gradient of " + name.removeprefix("net."), parameter.grad.norm())

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
        if event not in vars(Recorder) and event not in MISSING.get(loop, ()):
            add(event)
    return Recorder()


class InOneDialect(hookline.TrainingHook):
    """The style of step hooks: it gets a context."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, ctx):
        self.steps.append(ctx.step)


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


def built_ins(folder: Path, webhook: str) -> list[Any]:
    """Return all built-in hooks."""
    return [
        hookline.GradientMonitor(log_frequency=2),
        hookline.LRMonitor(),
        hookline.ActivationStats(log_interval=2),
        hookline.RuntimeProfile(log_frequency=2),
        hookline.TorchProfiler(active=1, folder=folder / "traces"),
        hookline.LoggingHook(),
        hookline.ConsoleLogHook(),
        hookline.JSONLogHook(path=str(folder / "log.jsonl")),
        hookline.DebugHook(),
        hookline.EMA(decay=0.5),
        hookline.EarlyStopping(monitor="val/loss", patience=5),
        hookline.TimeLimit("10h"),
        hookline.ModelCheckpoint(monitor="val/loss", save_top_k=1),
        hookline.CheckpointHook(),
        hookline.UploadHook(folder / "uploaded"),
        hookline.Heartbeat(path=folder / "heartbeat"),
        hookline.NotificationHook(webhook_url=webhook),
    ]


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
    Webhook.received.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def run(loop: str, folder: Path, *more: Any) -> dict[str, Any]:
    """Train in a loop with all kinds of hooks; return what they saw."""
    with webhook() as url:
        return run_with(loop, folder, url, *more)


def run_with(loop: str, folder: Path, url: str, *more: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    recorder, dialect, toggling = make_recorder(loop), InOneDialect(), Toggling()
    capture = hookline.probes.Capture("**.head" if loop == "lightning" else "head")
    hooks = [recorder, dialect, Failing(), toggling, capture, *built_ins(folder, url), *more]
    model, session = LOOPS[loop](hooks, folder)
    lines = (session.run.path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {
        "events": recorder.events,
        "values": recorder.values,
        "steps": dialect.steps,
        "toggled": toggling.seen,
        "failures": {info.name: info.failures for info in session.hooks.describe()}["failing"],
        "captured": capture.counts.captured,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "records": {
            name: [(r["step"], r["value"]) for r in found if r["name"] == name]
            for name in ("train/loss", "val/loss", "gradients/total/norm")
        },
        "status": session.run.manifest["status"],
        "saved": sorted(path.name for path in (session.run.path / "checkpoints").iterdir()),
        "written": sorted(path.name for path in folder.iterdir() if path.name in WRITTEN),
        "notifications": len(Webhook.received),
        "failed": [info.name for info in session.hooks.describe() if info.failures],
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What hooks see in Hookline's own trainer, with and without an update."""
    folder = tmp_path_factory.mktemp("trainer")
    return run("trainer", folder)


def comparable(events: list[str], loop: str) -> list[str]:
    """Return the events in order; a checkpoint is written in the background, so it comes last."""
    missing = MISSING.get(loop, set())
    found = [event for event in events if event.split()[0] not in missing]
    return sorted(found, key=lambda event: event == "on_checkpoint_save")


@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "trainer"])
def test_hooks_see_the_same_in_every_loop(loop, expected, tmp_path):
    found = run(loop, tmp_path)
    assert comparable(found["events"], loop) == comparable(expected["events"], loop)
    for name, values in expected["values"].items():
        assert found["values"][name] == pytest.approx(values, rel=1e-5), name
    for name, records in expected["records"].items():
        assert [step for step, _ in found["records"][name]] == [step for step, _ in records], name
        values = [value for _, value in records]
        assert [value for _, value in found["records"][name]] == pytest.approx(values, rel=1e-5)
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weights, rtol=1e-5, atol=1e-6)
    for key in ("steps", "toggled", "failures", "captured", "status", "saved", "written"):
        assert found[key] == expected[key], key
    assert found["failed"] == expected["failed"] == ["failing"]
    assert found["notifications"] == expected["notifications"] == 1
    assert found["written"] == sorted(WRITTEN)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_update_changes_training_in_the_same_way(loop, expected, tmp_path):
    class Halve(hookline.UpdateHook):
        def __call__(self, gradients):
            return {name: gradient / 2 for name, gradient in gradients.items()}

    own = run("trainer", tmp_path / "trainer", Halve())
    found = run(loop, tmp_path / "loop", Halve())
    for name, weights in own["weights"].items():
        torch.testing.assert_close(found["weights"][name], weights, rtol=1e-5, atol=1e-6)
    first = next(iter(expected["weights"].values()))
    assert not torch.equal(next(iter(own["weights"].values())), first)


@pytest.mark.parametrize("loop", MISSING)
def test_what_a_loop_does_not_give_is_refused_by_name(loop, tmp_path):
    for event in MISSING[loop]:
        method = {event: lambda self: None}
        hook = type("Needy", (hookline.Hook,), method)()
        with pytest.raises(NotSuppliedError, match=event):
            LOOPS[loop]([hook], tmp_path)
