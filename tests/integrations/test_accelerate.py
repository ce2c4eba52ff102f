"""A loop that is written by hand with Accelerate, alone and in two processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_launch import TWO, launch
from accelerated_loop import run
from loops import batches, fit, make, recorder, run_on_two_ranks, same, told_in, weights
from torch import nn
from torch.nn import functional as F

import hookline


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)
    _reset_accelerate()
    yield
    _reset_accelerate()


def _reset_accelerate() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Numbers(hookline.Hook):
    """Keeps the numbers that every loop has to give alike."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.gradients: list[torch.Tensor] = []
        self.clips: list[float] = []

    def on_gradients_ready(self, model):
        self.gradients += [p.grad.clone() for p in model.parameters()]

    def on_gradient_clip(self, grad_norm):
        self.clips.append(grad_norm)

    def on_step_end(self, step, loss, grad_norm, lr):
        self.steps.append((step, loss, grad_norm, lr))


class Loop:
    """An ordinary Accelerate script."""

    def __init__(self, accumulate: int = 2, scaler: Any = None, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        if scaler is not None:  # Accelerate has fp16 on GPUs only
            self.accelerator.scaler = scaler
            self.accelerator.state._mixed_precision = "fp16"
        model, optimizer = make()
        model.drop.p = 0.0  # a loader draws random numbers
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = torch.utils.data.DataLoader(
            [(x, y) for xs, ys in batches(5) for x, y in zip(xs, ys, strict=True)], batch_size=4
        )
        accelerator = self.accelerator
        if scaler is not None:
            accelerator.native_amp = False  # for `prepare`, which knows no fp16 on the CPU
        self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        accelerator.native_amp |= scaler is not None
        self.skipped: list[bool] = []

    def attach(self, *hooks: hookline.Hook, **options: Any) -> Any:
        options = {"runs": None, "schedulers": self.scheduler, **options}
        return hookline.attach(self.model, self.optimizer, hooks=hooks, **options)

    def run(self, clip: float | None = 0.5, spoiled: int | None = None) -> Loop:
        accelerator = self.accelerator
        for i, (x, y) in enumerate(self.loader):
            with accelerator.accumulate(self.model):
                loss = F.mse_loss(self.model(x * 1e38 if i == spoiled else x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.skipped.append(accelerator.optimizer_step_was_skipped)
        return self


def test_steps_losses_gradients_and_weights_are_those_of_our_trainer():
    """The fifth batch is a step of its own, whose loss Accelerate divides by two, too."""
    numbers = Numbers()
    loop = Loop()
    with loop.attach(numbers) as session:
        loop.run()
    own = Numbers()
    model, _ = make()
    model.drop.p = 0.0
    fit(own, model=model, accumulate=2, clip_norm=0.5, loss_fn=F.mse_loss)
    assert session.step == 3
    assert [row[0] for row in numbers.steps] == [1, 2, 3]
    assert numbers.steps[0] == pytest.approx(own.steps[0], rel=1e-6)
    assert same(numbers.gradients[:4], own.gradients[:4])
    assert numbers.clips == [row[2] for row in numbers.steps]
    assert [row[3] for row in numbers.steps] == [0.1, 0.05, 0.025]
    plain = Loop().run()
    assert same(weights(loop.model), weights(plain.model))


def test_the_loss_is_that_of_the_batches():
    class Losses(hookline.Hook):
        def __init__(self):
            self.losses = []

        def on_step_end(self, loss):
            self.losses.append(loss)

    loop, hook, own = Loop(), Losses(), []
    loop.model.eval()  # without dropout
    loop.model.register_forward_hook(
        lambda module, args, out: own.append(F.mse_loss(out, targets[len(own)]).item())
    )
    targets = [y for _, y in loop.loader]
    with loop.attach(hook):
        loop.run()
    means = [(own[0] + own[1]) / 2, (own[2] + own[3]) / 2, own[4]]
    assert hook.losses == pytest.approx(means, rel=1e-6)


def test_batches_that_complete_no_step_fire_none():
    told = recorder("on_before_optimizer_step", "on_train_batch_end", "on_step_end")
    loop = Loop(accumulate=3)
    with loop.attach(told) as session:
        loop.loader = session.batches(list(loop.loader))
        for i, (x, y) in enumerate(loop.loader):
            loop.accelerator.gradient_state._set_sync_gradients(i in (2, 4))
            loop.accelerator.backward(F.mse_loss(loop.model(x), y))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    step = ["on_before_optimizer_step", "on_train_batch_end", "on_step_end"]
    assert told.told == ["on_train_batch_end"] * 2 + step + ["on_train_batch_end"] + step


def test_the_scaler_of_a_prepared_optimizer_is_found():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    loop, numbers = Loop(accumulate=1, scaler=scaler), Numbers()
    told = recorder(on_step_skipped=("reason",))
    with loop.attach(numbers, told) as session:
        assert session.scaler is scaler
        loop.run(spoiled=1)
    assert "step" not in vars(scaler)
    assert loop.skipped == [False, True, False, False, False]
    assert [row["reason"] for row in told_in(told, "on_step_skipped")] == [
        "the scaler found non-finite gradients"
    ]
    assert session.step == 4
    _reset_accelerate()
    plain, unscaled = Loop(accumulate=1), Numbers()
    with plain.attach(unscaled):
        plain.run()
    assert numbers.steps[0] == pytest.approx(unscaled.steps[0], rel=1e-5)


def test_an_accelerator_is_there_for_hooks():
    class Watch(hookline.Hook):
        def __init__(self):
            self.seen = []

        def on_step_end(self, trainer):
            self.seen.append(trainer.accelerator.sync_gradients)

    loop, hook = Loop(), Watch()
    options = {"model": loop.model, "optimizer": loop.optimizer, "runs": None}
    with hookline.attach(loop.accelerator, hooks=[hook], **options) as session:
        loop.run()
    assert session.accelerator is loop.accelerator
    assert hook.seen == [True, True, True]
    with pytest.raises(hookline.ArgumentError, match=r"model=model, optimizer=optimizer"):
        hookline.attach(loop.accelerator, hooks=[hook])


class Counts(hookline.Hook):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps, "all": {self.steps}}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_hooks_are_saved_and_loaded_with_the_states_of_accelerate(tmp_path: Path):
    loop, first = Loop(), Counts()
    session = loop.attach(first, runs=tmp_path / "runs")
    loop.accelerator.register_for_checkpointing(session)
    with session:
        loop.run()
        loop.accelerator.save_state(str(tmp_path / "saved"))
    _reset_accelerate()
    loop, second = Loop(), Counts()
    told = recorder(on_checkpoint_load=("step",), on_step_end=("step",))
    resumed = loop.attach(second, told, runs=tmp_path / "runs")
    loop.accelerator.register_for_checkpointing(resumed)
    loop.accelerator.load_state(str(tmp_path / "saved"))
    with resumed:
        loop.run()
    assert second.steps == 6
    assert told.told[:2] == [("on_checkpoint_load", {"step": 3}), ("on_step_end", {"step": 4})]
    assert resumed.run.id == session.run.id


def test_a_session_saves_and_loads_all_that_accelerate_has_prepared(tmp_path: Path):
    loop, first = Loop(), Counts()
    with loop.attach(first) as session:
        loop.run()
        session.save_checkpoint(tmp_path / "saved", wait=True)
    _reset_accelerate()
    other, second = Loop(), Counts()
    session = other.attach(second)
    loaded = session.load_checkpoint(tmp_path / "saved")
    assert (loaded.step, second.steps) == (3, 3)
    assert same(weights(loop.model), weights(other.model))
    assert other.scheduler.get_last_lr() == loop.scheduler.get_last_lr()


def test_a_state_is_loaded_before_training_starts():
    loop = Loop()
    with loop.attach(Counts()) as session:
        state = session.state_dict()
        with pytest.raises(hookline.LoopError, match="before that"):
            session.load_state_dict(state)


SCRIPT = """
import sys, torch, hookline
sys.path.insert(0, {tests!r})
from accelerate import Accelerator
from loops import batches, make, weights, same
from torch.nn import functional as F

class Watch(hookline.Hook):
    def __init__(self): self.steps, self.gathered, self.norms = [], [], []
    def on_after_forward(self, outputs): self.shape = tuple(outputs.shape)
    def on_step_end(self, trainer, step, loss, grad_norm):
        self.steps.append(step)
        self.norms.append(grad_norm)
        value = torch.tensor([float(loss)])
        self.gathered.append(trainer.accelerator.gather_for_metrics(value).tolist())
        if step == 3 and trainer.accelerator.process_index == 1:
            trainer.stop("rank 1")

def run(*hooks):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = make()
    data = [(x, y) for xs, ys in batches(16) for x, y in zip(xs, ys)]
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(accelerator.process_index)
    session = hookline.attach(
        accelerator, model=model, optimizer=optimizer, hooks=hooks, runs=None
    ) if hooks else None
    done = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        done += accelerator.sync_gradients
        if done == 3:
            break
        if session is not None and session.should_stop:
            break
    stopped = session is not None and session.should_stop
    if session is not None: session.detach()
    return accelerator, weights(model), stopped

watch = Watch()
accelerator, observed, stopped = run(watch)
_, plain, _ = run()
assert same(observed, plain)
assert watch.steps == [1, 2, 3] and stopped, (watch.steps, stopped)
assert all(len(pair) == 2 for pair in watch.gathered)
norms = accelerator.gather_for_metrics(torch.tensor(watch.norms)).view(2, 3)
assert torch.equal(norms[0], norms[1]), norms
print(f"rank {{accelerator.process_index}} ok\\n", end="", flush=True)
accelerator.end_training()
"""


def test_two_processes(tmp_path: Path):
    output = run_on_two_ranks(
        SCRIPT.format(tests=str(Path(__file__).parents[1] / "support")), tmp_path
    )
    assert "rank 0 ok" in output
    assert "rank 1 ok" in output


def metrics_of(runs: Path) -> dict[str, list[float]]:
    """Return the values of each metric of the only run in a folder, but for times."""
    (folder,) = runs.iterdir()
    opened = hookline.open_run(folder)
    assert opened.status == "completed"
    values: dict[str, list[float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        values.setdefault(record["name"], []).append(record["value"])
    return values


@pytest.mark.soak
def test_accelerate_launch_with_two_processes_gives_what_one_gives(tmp_path: Path):
    """A step of two processes has the batches of two that one process accumulates.

    Their gradients are added in another order, in float32: numbers agree to about 6 digits.
    """
    alone = run(2, tmp_path / "one")
    launch(
        str(Path(__file__).parents[1] / "support" / "accelerated_loop.py"),
        str(tmp_path),
        options=TWO,
    )
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank in ranks:
        watched = rank["watched"]
        assert watched["events"] == alone["events"]
        assert watched["weights"] == rank["plain"]["weights"]
        assert watched["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for name, value in watched["weights"].items():
            expected = torch.tensor(alone["weights"][name])
            torch.testing.assert_close(torch.tensor(value), expected, rtol=1e-5, atol=1e-6)
    of_ranks = zip(*(rank["watched"]["losses"] for rank in ranks), strict=True)
    assert [sum(both) / 2 for both in of_ranks] == pytest.approx(alone["losses"], rel=1e-5)
    found, expected = metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert {"train/loss", "gradients/total/norm"} <= found.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_a_model_with_mixed_precision_is_seen():
    told = recorder("on_after_forward", on_step_end=("loss",))
    loop = Loop(mixed_precision="bf16")
    assert isinstance(loop.model, nn.Module)
    with loop.attach(told):
        loop.run()
    assert told.told.count("on_after_forward") == 5
    assert len(told_in(told, "on_step_end")) == 3
