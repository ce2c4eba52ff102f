"""Bare loops as people write them: events, numbers and weights are those of the trainer."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from every_loop import LOOPS, LOOPS_AS_WRITTEN, Head
from torch import nn

import hookline


class Sees(hookline.Hook):
    """Notes events and numbers; `on_before_backward` needs a call of the session."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.values: list[float] = []

    def on_train_batch_start(self, batch_idx):
        self.events.append(("batch starts", batch_idx))

    def on_after_forward(self):
        self.events.append("forward")

    def on_after_backward(self):
        self.events.append("backward")

    def on_gradients_ready(self, optimizer_idx):
        self.events += ["ready"] * (optimizer_idx == 0)

    def on_gradient_clip(self, grad_norm):
        self.events.append("clip")
        self.values.append(grad_norm)

    def on_train_batch_end(self, batch_idx, loss):
        self.events.append(("batch ends", batch_idx))
        self.values.append(loss)

    def on_step_end(self, step, loss, grad_norm, lr):
        self.events.append(("step", step))
        self.values += [loss, grad_norm, lr]

    def on_validation_end(self, metrics):
        self.values.append(metrics["val/loss"])


def run(loop: Any, folder: Path) -> tuple[Sees, list[int], dict[str, Any], Any]:
    """Train with a hook, one with a schedule and one that saves."""
    sees, ticks = Sees(), []

    class Ticks(hookline.Hook):
        def on_step_end(self, step):
            ticks.append(step)

    saving = {"name": "model_checkpoint", "every_n_steps": 6}
    model, session = loop([sees, hookline.every(2, Ticks()), saving], folder)
    weights = {name.removeprefix("net."): v.clone() for name, v in model.state_dict().items()}
    return sees, ticks, weights, session


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(LOOPS["trainer"], tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("loop", LOOPS_AS_WRITTEN)
def test_hooks_see_the_same_in_loops_as_people_write_them(loop, expected, tmp_path) -> None:
    sees, ticks, weights, session = run(LOOPS_AS_WRITTEN[loop], tmp_path)
    assert sees.events == expected[0].events
    assert sees.values == pytest.approx(expected[0].values, rel=1e-5)
    assert ticks == expected[1] == [2, 4, 6]
    for name, value in expected[2].items():
        assert torch.equal(weights[name], value), name
    (saved,) = (session.run.path / "checkpoints").glob("*step*")
    assert saved.is_dir()
    assert session.status == "completed"


class NoSession:
    """Stands for the session in a loop without hooks: nothing is attached."""

    step = 0
    epoch = validation = nullcontext
    batches = staticmethod(iter)

    def __enter__(self) -> NoSession:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def log(self, *args: Any) -> None: ...


@pytest.mark.parametrize("loop", LOOPS_AS_WRITTEN)
def test_weights_are_bit_identical_to_those_of_the_loop_without_hooks(
    loop, tmp_path, monkeypatch
) -> None:
    hooks = [Sees(), hookline.GradientMonitor(), {"name": "model_checkpoint", "every_n_steps": 6}]
    model, _ = LOOPS_AS_WRITTEN[loop](hooks, tmp_path)
    random_state = torch.get_rng_state()
    monkeypatch.setattr(hookline, "attach", lambda *args, **options: NoSession())
    without, _ = LOOPS_AS_WRITTEN[loop]([], tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    weights = model.state_dict()
    assert weights.keys() == without.state_dict().keys()
    for name, value in without.state_dict().items():
        assert torch.equal(weights[name], value), name


class Words(nn.Module):
    """A model of tokens, with a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(8, 4), Head(4, 1)

    def forward(self, tokens):
        return self.embedding(tokens)


def train_words(hooks: list[Any], folder: Path) -> Any:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookline.attach(model, optimizer, hooks=hooks, runs=folder) as session:
        for _ in range(3):
            model(torch.zeros(2, 5, dtype=torch.long)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return session


def test_tokens_are_counted_where_the_embedding_gets_them(tmp_path) -> None:
    class Counts(hookline.Hook):
        seen: ClassVar[list[int]] = []

        def on_step_end(self, tokens_seen):
            self.seen.append(tokens_seen)

    train_words([Counts()], tmp_path)
    assert Counts.seen == [10, 20, 30]


def test_an_edit_of_a_module_that_is_never_called_raises(tmp_path) -> None:
    edit = hookline.probes.Edit.ablate(Head, enable_intervention=True)
    with pytest.raises(hookline.HooklineError, match="unused"):
        train_words([edit], tmp_path)


def test_a_signal_saves_a_last_checkpoint_and_ends_as_preempted(tmp_path) -> None:
    class Signals(hookline.Hook):
        def on_step_end(self, step):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    hooks = [Signals(), hookline.ModelCheckpoint(every_n_steps=100)]
    with pytest.raises(SystemExit, match="143"):
        LOOPS_AS_WRITTEN["data is noticed"](hooks, tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "manifest.json").read_text())["status"] == "preempted"
    assert (run / "checkpoints" / "step_000002").is_dir()
