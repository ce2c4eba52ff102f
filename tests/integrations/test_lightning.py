"""Hooks in a real Lightning Trainer."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import loops
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from loops import same, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import hookline
from hookline.errors import LoopError, NotSuppliedError
from hookline.events import EVENTS
from hookline.integrations.lightning import LIBRARY as HOST
from hookline.integrations.lightning import HooklineCallback


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """Calls `self.net`, never itself."""

    def __init__(self, fused: bool | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.loss = nn.MSELoss()

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log("error", loss.sqrt())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.hparams.fused)


def data(batches: int = 6, kind: Any = DataLoader) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * batches, 4, generator=generator)
    return kind(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


def module(kind: type[Module] = Module, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options)


def make_trainer(folder: Path, package: Any = lightning, **options: Any) -> Any:
    defaults = {"max_epochs": 2, "devices": 1, "logger": False, "enable_checkpointing": False}
    return package.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )


def fit(
    folder: Path,
    hooks: Any,
    model: Any = None,
    *,
    batches: int = 6,
    val: Any = None,
    runs: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Train with hooks; return the session and the LightningModule."""
    model = module() if model is None else model
    trainer = make_trainer(folder, **options)
    session = hookline.attach(trainer, hooks=hooks, runs=runs)
    trainer.fit(model, data(batches), val)
    return session, model


def recorder(*events: str) -> Any:
    """Return a hook that notes these events, with all their arguments; all but clips by default."""

    class Recorder(hookline.Hook):
        def __init__(self) -> None:
            self.seen: list[tuple[str, dict[str, Any]]] = []

        def named(self, event: str) -> list[dict[str, Any]]:
            return [kwargs for name, kwargs in self.seen if name == event]

        @property
        def names(self) -> list[str]:
            return [name for name, _ in self.seen]

    def method(event: str) -> Any:
        def note(self: Any, **kwargs: Any) -> None:
            if event == "on_before_backward":
                kwargs["loss"] = kwargs["loss"].detach()
            plain = {k: float(v) if k in NUMBERS else v for k, v in kwargs.items()}
            if event in GRADIENTS:
                gradients = [p.grad for p in kwargs["model"].parameters()]
                plain["gradients"] = [g.clone() for g in gradients if g is not None]
            self.seen.append((event, plain))

        return note

    for event in events or EVENTS.keys() - {"on_gradient_clip"}:
        setattr(Recorder, event, method(event))
    return Recorder()


NUMBERS = {"loss", "grad_norm", "lr"}
GRADIENTS = {"on_gradients_ready", "on_before_optimizer_step", "on_step_end"}


def records(session: Any, name: str) -> list[tuple[int, Any]]:
    lines = (session.run.path / "metrics.jsonl").read_text().splitlines()
    found = (json.loads(line) for line in lines)
    return [(record["step"], record["value"]) for record in found if record["name"] == name]


def manifest(session: Any) -> dict[str, Any]:
    return json.loads((session.run.path / "manifest.json").read_text())


# -- the same as in Hookline's own trainer --------------------------------------------------------


def test_events_gradients_losses_and_weights_are_those_of_hooklines_trainer(tmp_path) -> None:
    there, here = recorder(*EVENTS), recorder(*EVENTS)
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4, "num_sanity_val_steps": 2}
    _, trained = fit(tmp_path, [there], batches=8, val=data(2), **options)

    own = module()
    loops.fit(
        here,
        model=own.net,
        optimizers=torch.optim.AdamW(own.net.parameters(), lr=0.01),
        loss_fn=nn.MSELoss(),
        data=data(8),
        val=data(2),
        max_epochs=2,
        accumulate=4,
        clip_norm=0.5,
    )

    assert there.names == here.names
    assert there.names.count("on_gradients_ready") == 4
    for (event, given), (_, expected) in zip(there.seen, here.seen, strict=True):
        for name in {"step", "epoch", "batch_idx", "optimizer_idx"} & expected.keys():
            assert given[name] == expected[name], (event, name)
        for name in NUMBERS & expected.keys():
            assert given[name] == pytest.approx(expected[name], rel=1e-5), (event, name)
        for a, b in zip(given.get("gradients", ()), expected.get("gradients", ()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(trained.net.parameters(), own.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for event in ("on_validation_end", "on_epoch_end"):
        for given, expected in zip(there.named(event), here.named(event), strict=True):
            for name in ("val/loss", "train/loss"):
                if name in expected["metrics"]:
                    value = pytest.approx(float(expected["metrics"][name]), rel=1e-5)
                    assert float(given["metrics"][name]) == value


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_session_that_observes_changes_no_bit(tmp_path, precision) -> None:
    options = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    plain = module()
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(plain, data(), data(2))
    hooks = [recorder(), hookline.GradientMonitor(log_frequency=1), hookline.probes.Monitor("**")]
    _, watched = fit(tmp_path, hooks, val=data(2), runs=tmp_path / "runs", **options)
    assert same(weights(plain), weights(watched))


# -- forward, backward, step ----------------------------------------------------------------------


def test_forwards_are_seen_wherever_the_training_step_calls_the_model(tmp_path) -> None:
    class Called(Module):
        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            return self.loss(self(batch[0]), batch[1])

    class Listed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleList([nn.Linear(4, 1), nn.Linear(1, 1)])

        def training_step(self, batch, batch_idx):
            return self.loss(self.net[1](self.net[0](batch[0])), batch[1])

    for kind, calls in ((Module, 12), (Called, 12), (Listed, 24)):
        seen = recorder("on_before_forward", "on_after_forward", "on_after_backward")
        fit(tmp_path, [seen], module(kind))
        assert seen.names.count("on_before_forward") == calls
        assert [k["outputs"].shape for k in seen.named("on_after_forward")] == [(4, 1)] * calls
        assert seen.names.count("on_after_backward") == 12


def test_a_steps_loss_is_the_mean_of_its_batches_own_losses(tmp_path) -> None:
    seen = recorder("on_before_backward", "on_train_batch_end", "on_step_end")
    fit(tmp_path, [seen], accumulate_grad_batches=4, max_epochs=1)
    own = [k["loss"] for k in seen.named("on_train_batch_end")]
    differentiated = [k["loss"] for k in seen.named("on_before_backward")]
    assert differentiated == pytest.approx([loss / 4 for loss in own])
    means = [sum(own[:4]) / 4, sum(own[4:]) / 2]  # the last step has two batches
    assert [k["loss"] for k in seen.named("on_step_end")] == pytest.approx(means)


def test_probes_name_modules_as_the_lightning_module_does(tmp_path) -> None:
    capture = hookline.probes.Capture(["net.0", "net.2"])
    fit(tmp_path, [capture], limit_train_batches=1, max_epochs=1)
    states = capture.states()
    assert {state.module for state in states} == {"net.0", "net.2"}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_seen_before_lightning_clips_and_as_the_optimizer_uses_them(
    tmp_path, algorithm
) -> None:
    seen = recorder(
        "on_gradients_ready", "on_gradient_clip", "on_before_optimizer_step", "on_step_end"
    )
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    fit(tmp_path, [seen], accumulate_grad_batches=2, max_epochs=1, **options)
    norms = [
        torch.stack([g.norm() for g in k["gradients"]]).norm()
        for k in seen.named("on_gradients_ready")
    ]
    assert len(norms) == 3
    for norm, clip, before, end in zip(
        norms,
        seen.named("on_gradient_clip"),
        seen.named("on_before_optimizer_step"),
        seen.named("on_step_end"),
        strict=True,
    ):
        assert clip["grad_norm"] == pytest.approx(float(norm)) == end["grad_norm"]
        assert all(g.abs().max() <= 0.0101 for g in before["gradients"])
        assert same(before["gradients"], end["gradients"])


def test_an_update_changes_what_lightning_clips_and_uses(tmp_path) -> None:
    _, untouched = fit(tmp_path, [], module(), max_steps=0)
    _, masked = fit(tmp_path, [hookline.updates.Scale(0.0)], gradient_clip_val=1.0, max_epochs=1)
    moved = [a.sub(b).abs().max() for a, b in zip(weights(masked), weights(untouched), strict=True)]
    assert max(moved) < 1e-3  # of weight decay only


class ClipsByHand(Module):
    """Changes gradients between backward and the step, without torch's clipping functions."""

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        for parameter in self.parameters():
            parameter.grad.clamp_(-1e-3, 1e-3)


def test_a_module_that_clips_by_hand_is_seen_before_and_after_it_clips(tmp_path) -> None:
    plain = module(ClipsByHand)
    make_trainer(tmp_path).fit(plain, data())
    seen = recorder("on_gradients_ready", "on_before_optimizer_step")
    session, model = fit(tmp_path, [seen], module(ClipsByHand))
    assert session.status == "completed"
    assert len(seen.named("on_gradients_ready")) == 12

    def largest(event: str) -> float:
        gradients = [g for kwargs in seen.named(event) for g in kwargs["gradients"]]
        return max(float(g.abs().max()) for g in gradients)

    assert largest("on_gradients_ready") > 0.1
    assert largest("on_before_optimizer_step") == pytest.approx(1e-3)
    assert same(weights(model), weights(plain))


class ClampsAfterBackward(Module):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.clamp_(-1e-3, 1e-3)


def test_gradients_that_are_changed_before_they_can_be_seen_are_refused_in_the_first_step(
    tmp_path,
) -> None:
    model = module(ClampsAfterBackward)
    with pytest.raises(LoopError, match="before anything has changed them"):
        fit(tmp_path, [recorder("on_gradients_ready")], model)
    assert same(weights(model), weights(module()))
    assert fit(tmp_path, [recorder("on_step_end")], model)[0].step == 12


class UsesLBFGS(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def test_hooks_on_the_gradients_of_lbfgs_are_refused_when_the_fit_starts(tmp_path) -> None:
    model, batches_seen = module(UsesLBFGS), []
    model.on_train_batch_start = lambda *args: batches_seen.append(args)
    seen = recorder("on_gradients_ready", "on_train_start")
    with pytest.raises(LoopError, match="LBFGS evaluates its closure many times"):
        fit(tmp_path, [seen], model)
    assert not batches_seen
    assert not seen.names
    seen = recorder("on_after_backward")
    assert fit(tmp_path, [seen], module(UsesLBFGS))[0].step == 12
    assert len(seen.names) > 12


class HasNoOptimizer(Module):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize("kind", [UsesLBFGS, HasNoOptimizer])
def test_a_refused_fit_leaves_no_hooks_for_the_next_attach(tmp_path, kind) -> None:
    trainer, refused = make_trainer(tmp_path), recorder("on_gradients_ready")
    session = hookline.attach(trainer, hooks=[refused])
    with pytest.raises(LoopError, match=r"LBFGS|no optimizer"):
        trainer.fit(module(kind), data())
    assert session.status == "error"
    assert trainer.callbacks == make_trainer(tmp_path).callbacks == []
    seen = recorder("on_step_end")
    hookline.attach(trainer, hooks=[seen])
    trainer.fit(module(), data())
    assert len(seen.names) == 12
    assert not refused.names


class Adversarial(Module):
    """Two optimizers in manual optimization; the second steps in every `every`th batch."""

    def __init__(self, every: int = 1, inner: int = 1) -> None:
        super().__init__()
        self.every, self.inner = every, inner
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for _ in range(self.inner):
            self.toggle_optimizer(first)
            loss = self.loss(self.net(batch[0]), batch[1])
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, 0.01, "norm")
            first.step()
            self.untoggle_optimizer(first)
        if (batch_idx + 1) % self.every == 0:
            self.toggle_optimizer(second)
            loss = self.critic(self.net(batch[0]).detach()).square().mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            self.untoggle_optimizer(second)

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.1),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ]


@pytest.mark.parametrize(("every", "inner"), [(1, 1), (3, 1), (1, 4), (100, 2)])
def test_a_manual_step_ends_when_each_optimizer_has_stepped_or_with_its_batch(
    tmp_path, every, inner
) -> None:
    seen = recorder(*EVENTS)
    plain = module(Adversarial, every=every, inner=inner)
    make_trainer(tmp_path, max_epochs=1).fit(plain, data())
    _, trained = fit(tmp_path, [seen], module(Adversarial, every=every, inner=inner), max_epochs=1)
    assert same(weights(plain), weights(trained))
    assert [k["step"] for k in seen.named("on_step_end")] == [1, 2, 3, 4, 5, 6]
    assert seen.names.count("on_train_batch_end") == 6
    turns = [k["optimizer_idx"] for k in seen.named("on_after_optimizer_step")]
    expected = []
    for batch in range(6):
        expected += [0] * inner + ([1] if (batch + 1) % every == 0 else [])
    assert turns == expected
    assert [k["optimizer_idx"] for k in seen.named("on_gradients_ready")] == expected
    assert seen.names.count("on_gradient_clip") == 6 * inner
    assert all(k["grad_norm"] > 0.01 for k in seen.named("on_gradient_clip"))


def test_a_training_step_without_a_loss_is_a_skipped_step(tmp_path, caplog) -> None:
    class Skipping(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (0, 2) else super().training_step(batch, batch_idx)

    class Losses(hookline.Hook):
        def __init__(self) -> None:
            self.batches, self.steps = [], []

        def on_train_batch_end(self, loss) -> None:
            self.batches.append(float(loss))

        def on_step_end(self, loss) -> None:
            self.steps.append(float(loss))

    seen, losses = recorder("on_step_skipped", "on_step_end", "on_after_optimizer_step"), Losses()
    session, _ = fit(tmp_path, [seen, losses], module(Skipping), max_epochs=1, runs=tmp_path / "r")
    assert [k["reason"] for k in seen.named("on_step_skipped")] == ["there are no gradients"] * 2
    assert session.step == 4
    assert [k["ctx"].skipped for k in seen.named("on_step_end")].count(True) == 2
    for values in (losses.batches, losses.steps):  # the hook stays enabled
        assert [math.isnan(value) for value in values] == [True, False, True, False, False, False]
    recorded = [value for _, value in records(session, "train/loss")]
    assert [value for value in losses.steps if not math.isnan(value)] == recorded
    assert "The run has no train/loss" not in caplog.text  # the first step was skipped


def test_a_scaled_loss_gives_unscaled_gradients_and_losses(tmp_path) -> None:
    seen, expected = recorder(), recorder()
    fit(tmp_path, [expected], max_epochs=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit(tmp_path, [seen], max_epochs=1, plugins=[plugin])
    for event in ("on_before_backward", "on_step_end"):
        for given, wanted in zip(seen.named(event), expected.named(event), strict=True):
            assert given["loss"] == pytest.approx(wanted["loss"], rel=0.05)
    for given, wanted in zip(
        seen.named("on_gradients_ready"), expected.named("on_gradients_ready"), strict=True
    ):
        for a, b in zip(given["gradients"], wanted["gradients"], strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_a_compiled_child_is_watched_and_one_compiled_in_place_is_refused(tmp_path) -> None:
    class Compiled(Module):
        def configure_model(self):
            self.net = torch.compile(self.net, backend="eager")

    class InPlace(Module):
        def configure_model(self):
            self.net.compile(backend="eager")

    seen = recorder("on_after_forward", "on_step_end")
    fit(tmp_path, [seen], module(Compiled), max_epochs=1)
    assert seen.names.count("on_after_forward") == 6
    assert all(k["loss"] > 0 for k in seen.named("on_step_end"))
    seen = recorder("on_step_end")
    fit(tmp_path, [seen], module(InPlace), max_epochs=1)
    assert all(k["loss"] > 0 for k in seen.named("on_step_end"))
    seen = recorder("on_after_forward")
    fit(tmp_path, [seen], module(InPlace), max_epochs=1)
    assert seen.names.count("on_after_forward") == 6


def test_a_module_that_is_compiled_as_a_whole_says_what_to_compile_instead(tmp_path) -> None:
    class Plain(Module):
        def training_step(self, batch, batch_idx):
            return self.loss(self.net(batch[0]), batch[1])

    compiled = torch.compile(module(Plain), backend="eager")
    with pytest.raises(NotSuppliedError, match=r"self\.net = torch\.compile\(self\.net\)"):
        fit(tmp_path, [recorder("on_after_forward")], compiled, max_epochs=1)


def test_lightning_itself_refuses_to_clip_with_a_fused_optimizer_in_mixed_precision(
    tmp_path,
) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}
    with pytest.raises(RuntimeError, match="fused"):  # the page about Lightning says so
        fit(tmp_path, [recorder("on_exception")], module(fused=True), max_epochs=1, **options)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"fast_dev_run": 2}, 2),
        ({"limit_train_batches": 0.5}, 6),
        ({"overfit_batches": 2}, 4),
        ({"max_steps": 5, "max_epochs": -1}, 5),
    ],
)
def test_lightnings_limits_end_training_as_completed(tmp_path, options, steps) -> None:
    seen = recorder("on_train_end", "on_step_end", "on_epoch_end")
    session, _ = fit(tmp_path, [seen], **options)
    assert session.step == seen.names.count("on_step_end") == steps
    assert [k["status"] for k in seen.named("on_train_end")] == ["completed"]


class ReplacesOptimizer(lightning.Callback):
    """Gives the trainer another optimizer before its third batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            trainer.optimizers = [torch.optim.Adam(pl_module.parameters())]


def test_an_optimizer_that_is_replaced_is_reported(tmp_path, caplog) -> None:
    options = {"callbacks": [ReplacesOptimizer()], "max_epochs": 1}
    session, _ = fit(tmp_path, [recorder("on_step_end")], **options)
    assert session.step == 2
    assert caplog.text.count("steps with another optimizer (Adam)") == 1
    with pytest.raises(LoopError, match=r"another optimizer.*be left out"):
        fit(tmp_path, [hookline.updates.Identity()], **options)


@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"max_epochs": 0}])
def test_a_fit_that_has_nothing_to_train_is_completed(tmp_path, options) -> None:
    seen = recorder("on_train_start", "on_train_end")
    session, _ = fit(tmp_path, [seen], **options)
    assert session.status == "completed"
    assert session.has_ended
    assert not seen.names  # as Lightning's own callbacks


class CopiesTrainer(lightning.Callback):
    """Copies the trainer within `fit`, and uses the copy."""

    copied: Any = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            type(self).copied = copy.deepcopy(trainer)
            self.copied.save_checkpoint(Path(trainer.default_root_dir) / "copy.ckpt")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, when Lightning's loops are copied
def test_a_copy_of_the_trainer_has_no_hooks(tmp_path, caplog) -> None:
    seen = recorder("on_step_end", "on_checkpoint_save")
    session, _ = fit(tmp_path, [seen], callbacks=[CopiesTrainer()], max_epochs=1)
    assert session.status == "completed"
    assert seen.names == ["on_step_end"] * 6
    assert "has no hooks" in caplog.text
    assert (tmp_path / "copy.ckpt").exists()
    copied = CopiesTrainer.copied
    assert not any(isinstance(each, HooklineCallback) for each in copied.callbacks)
    copied.validate(module(), data(2), verbose=False)
    assert seen.names == ["on_step_end"] * 6


# -- validation and metrics -----------------------------------------------------------------------


class PicklesTrainer(lightning.Callback):
    """Pickles the trainer within `fit`."""

    pickled = b""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            type(self).pickled = pickle.dumps(trainer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_trainer_is_pickled_with_hooks_that_have_not_trained_and_else_without(
    tmp_path, caplog
) -> None:
    trainer = make_trainer(tmp_path, callbacks=[PicklesTrainer()], max_epochs=1)
    session = hookline.attach(trainer, runs=None)
    session.add_hook(Counter(), "counter", every=2)
    first = pickle.loads(pickle.dumps(trainer))
    trainer.fit(module(), data())
    assert caplog.text.count("has no hooks") == 1  # while it trained
    again = [pickle.loads(each) for each in (PicklesTrainer.pickled, pickle.dumps(trainer))]
    assert caplog.text.count("has no hooks") == 1
    for copied in again:
        assert not any(isinstance(each, HooklineCallback) for each in copied.callbacks)
    (callback,) = (each for each in first.callbacks if isinstance(each, HooklineCallback))
    assert callback.session.hooks.describe()[0].schedule == session.hooks.describe()[0].schedule
    counter = callback.session.hooks.get_hook("counter")
    first.fit(module(), data())
    assert counter.counts == session.hooks.get_hook("counter").counts == {(1, "a"): 3}
    assert callback.session.status == "completed"


class WritesRank(hookline.Hook):
    """Writes a file in each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, status, step):
        name = f"{type(self).__name__} {os.environ['LOCAL_RANK']}"
        (self.folder / name).write_text(f"{status} {step} {trainer.run is not None}")


class WritesMain(WritesRank):
    ranks = "main"


@pytest.mark.parametrize(
    "strategy", [pytest.param("ddp_spawn", marks=pytest.mark.soak), "ddp_fork"]
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_processes_that_lightning_starts_from_this_one_have_the_hooks(tmp_path, strategy) -> None:
    trainer = make_trainer(tmp_path, devices=2, strategy=strategy, max_epochs=1)
    hooks = [WritesRank(tmp_path), WritesMain(tmp_path)]
    session = hookline.attach(trainer, hooks=hooks, runs=tmp_path / "runs")
    trainer.fit(module(), data())
    written = {path.name: path.read_text() for path in tmp_path.glob("Writes*")}
    assert written == {
        "WritesRank 0": "completed 3 True",
        "WritesRank 1": "completed 3 False",
        "WritesMain 0": "completed 3 True",
    }
    (run,) = (tmp_path / "runs").iterdir()
    assert hookline.open_run(run).manifest["status"] == "completed"
    assert session.step == 0  # of this process, which has not trained


def test_validations_within_an_epoch_and_with_several_loaders(tmp_path) -> None:
    seen = recorder()
    fit(tmp_path, [seen], val=[data(1), data(2)], val_check_interval=3, max_epochs=1)
    assert seen.names.count("on_validation_start") == 2  # the sanity check is not one
    batches = [(k["dataloader_idx"], k["batch_idx"]) for k in seen.named("on_validation_batch_end")]
    assert batches == [(0, 0), (1, 0), (1, 1)] * 2
    (_, second) = seen.named("on_validation_end")
    assert "val/loss/dataloader_idx_1" in second["metrics"]
    last = [name for name in seen.names if "validation_" in name or "epoch" in name][-2:]
    assert last == ["on_validation_end", "on_epoch_end"]


def test_metrics_have_lightnings_names_and_the_common_ones(tmp_path) -> None:
    seen = recorder("on_train_batch_end", "on_validation_end", "on_epoch_end")
    session, _ = fit(tmp_path, [seen], val=data(2), runs=tmp_path / "runs")
    for kwargs in seen.named("on_train_batch_end"):
        assert set(kwargs["metrics"]) == {"loss", "train_loss"}
        assert float(kwargs["metrics"]["train_loss"]) == pytest.approx(kwargs["loss"])
    for kwargs in seen.named("on_validation_end"):
        assert set(kwargs["metrics"]) == {"val_loss", "val/loss", "error", "val/error"}
    for kwargs in seen.named("on_epoch_end"):
        assert {"train/loss", "val/loss", "val_loss", "error"} <= set(kwargs["metrics"])
    steps = list(range(1, 13))
    assert [step for step, _ in records(session, "train/loss")] == steps
    assert dict(records(session, "train_loss")) == pytest.approx(
        dict(records(session, "train/loss"))
    )
    assert [step for step, _ in records(session, "val_loss")] == [6, 12]
    assert manifest(session)["config"] == {"fused": None}


def test_what_hooks_log_reaches_the_trainers_loggers_at_its_step(tmp_path) -> None:
    class Logs(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.log("seven", 7.0 * step)

        def on_epoch_end(self, trainer):
            trainer.log("epochs", 1)

    class TakesKeywords(CSVLogger):  # which is how Lightning calls it
        def log_metrics(self, *, metrics, step):
            super().log_metrics(metrics, step)

    logger = TakesKeywords(tmp_path)
    fit(tmp_path, [Logs()], max_epochs=1, logger=logger, log_every_n_steps=1)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    table = [dict(zip(rows[0].split(","), row.split(","), strict=True)) for row in rows[1:]]
    logged = {row["step"]: row for row in table if row["seven"]}
    assert [float(row["seven"]) for row in logged.values()] == [7.0 * i for i in range(1, 7)]
    losses = [row["step"] for row in table if row["train_loss"]]
    assert losses == list(logged) == ["0", "1", "2", "3", "4", "5"]  # as Lightning counts here
    assert sum(bool(row["epochs"]) for row in table) == 1


@pytest.mark.parametrize(("every", "seen"), [(4, [4, 8, 10]), (50, [10]), (0, [])])
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_what_hooks_log_waits_for_lightnings_logging_steps(tmp_path, every, seen) -> None:
    class Logs(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.log("own/step", step)

        def on_validation_end(self, trainer, step):
            trainer.log("own/validation", step)

    logger = CSVLogger(tmp_path)
    session, _ = fit(
        tmp_path,
        [Logs()],
        batches=5,
        val=data(1),
        logger=logger,
        log_every_n_steps=every,
        runs=tmp_path / "runs",
    )
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    table = [dict(zip(rows[0].split(","), row.split(","), strict=True)) for row in rows[1:]]
    assert [int(float(row["own/step"])) for row in table if row.get("own/step")] == seen
    assert [int(float(row["own/validation"])) for row in table if row["own/validation"]] == [5, 10]
    assert records(session, "own/step") == [(step, step) for step in range(1, 11)]


# -- checkpoints ----------------------------------------------------------------------------------


class Counter(hookline.Hook):
    """Has state of several types."""

    def __init__(self) -> None:
        self.counts: dict[Any, Any] = {(1, "a"): 0}
        self.total = torch.zeros(2)
        self.events: list[str] = []

    def on_step_end(self, step, loss):
        self.counts[1, "a"] += 1
        self.total += loss

    def on_train_batch_start(self, batch_idx, epoch):
        self.events.append(f"{epoch}/{batch_idx}")

    def on_checkpoint_save(self, path, step):
        assert torch.load(path, weights_only=True)["global_step"] == step
        self.events.append(f"saved {step}")

    def on_checkpoint_load(self, path, step):
        self.events.append(f"loaded {step}")

    def state_dict(self):
        return {"counts": self.counts, "total": self.total}

    def load_state_dict(self, state):
        self.counts, self.total = state["counts"], state["total"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata's loader
@pytest.mark.parametrize("every", [{"every_n_train_steps": 4}, {"every_n_epochs": 1}])
@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 18, "max_epochs": -1}])
def test_a_resumed_fit_continues_hooks_and_the_run(tmp_path, every, limit) -> None:
    def train(folder: Path, hook: Counter, ckpt_path: str | None = None, **options: Any) -> Any:
        saving = ModelCheckpoint(folder / "ckpt", save_top_k=-1, filename="{step}", **every)
        trainer = make_trainer(
            folder, enable_checkpointing=True, callbacks=[saving], **{**limit, **options}
        )
        session = hookline.attach(trainer, hooks=[hook], runs=folder / "runs")
        loader = data(kind=StatefulDataLoader)  # Lightning starts others anew in an epoch
        trainer.fit(module(), loader, data(1), ckpt_path=ckpt_path, weights_only=True)
        return session, weights(trainer.lightning_module)

    whole = Counter()
    session, expected = train(tmp_path / "whole", whole)
    losses = records(session, "train/loss")

    first, second = Counter(), Counter()
    is_within_epoch = "every_n_train_steps" in every
    part = {"max_steps": 9, "max_epochs": -1} if is_within_epoch else {"max_steps": -1}
    started, _ = train(tmp_path / "parts", first, **{"max_epochs": 1, **part})
    newest = max((tmp_path / "parts" / "ckpt").glob("*.ckpt"), key=os.path.getmtime)
    step = torch.load(newest, weights_only=True)["global_step"]
    assert step == (8 if is_within_epoch else 6)
    continued, trained = train(tmp_path / "parts", second, ckpt_path=str(newest))

    assert second.events[0] == f"loaded {step}"
    batches = [event for event in second.events if "/" in event]
    assert batches == [event for event in whole.events if "/" in event][step:]
    assert second.counts == whole.counts == {(1, "a"): 18}
    assert torch.equal(second.total, whole.total)
    assert same(trained, expected)
    assert continued.run.id == started.run.id
    assert records(continued, "train/loss") == losses
    epochs = records(session, "train/loss_epoch")
    assert len(epochs) == 3
    assert dict(records(continued, "train/loss_epoch")) == pytest.approx(dict(epochs))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("step", [6, 18])
def test_a_fit_that_continues_after_an_epochs_last_step_ends_this_epoch(tmp_path, step) -> None:
    def train(hook: Any, folder: str, ckpt_path: Any = None) -> Any:
        saving = ModelCheckpoint(
            tmp_path / folder, save_top_k=-1, filename="{step}", every_n_train_steps=6
        )
        trainer = make_trainer(
            tmp_path, enable_checkpointing=True, callbacks=[saving], max_epochs=3
        )
        session = hookline.attach(trainer, hooks=[hook], runs=tmp_path / "runs")
        trainer.fit(module(), data(), ckpt_path=ckpt_path, weights_only=True)
        return session

    whole, resumed = recorder("on_epoch_end"), recorder("on_epoch_end", "on_epoch_start")
    session = train(whole, "whole")
    expected = records(session, "train/loss_epoch")
    assert [epoch for epoch, _ in expected] == [6, 12, 18]
    session = train(resumed, "resumed", tmp_path / "whole" / f"step={step}.ckpt")
    epochs = [0, 1, 2][step // 6 - 1 :]
    assert [seen["epoch"] for seen in resumed.named("on_epoch_start")] == epochs
    ends = [seen for seen in whole.named("on_epoch_end") if seen["epoch"] in epochs]
    for seen, end in zip(resumed.named("on_epoch_end"), ends, strict=True):
        assert seen["epoch"] == end["epoch"]
        assert seen["metrics"]["train/loss"] == pytest.approx(end["metrics"]["train/loss"])
    assert dict(records(session, "train/loss_epoch")) == pytest.approx(dict(expected))


def test_a_checkpoint_is_announced_when_its_file_is_complete(tmp_path) -> None:
    hook = Counter()  # it reads the file
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=3)
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saving], max_epochs=1)
    session = hookline.attach(trainer, hooks=[hook], runs=tmp_path / "runs")
    trainer.fit(module(), data())
    assert [event for event in hook.events if "saved" in event] == ["saved 3", "saved 6"]
    assert not session.hooks.describe()[0].failures
    assert "save_checkpoint" not in vars(trainer)


def test_a_plugin_that_writes_in_the_background_is_refused(tmp_path) -> None:
    trainer = make_trainer(tmp_path, plugins=[AsyncCheckpointIO()], max_epochs=1)
    hookline.attach(trainer, hooks=[Counter()])
    with pytest.raises(LoopError, match="AsyncCheckpointIO"):
        trainer.fit(module(), data())
    assert "save_checkpoint" not in vars(trainer)


def test_a_file_that_lightning_writes_and_removes_is_no_checkpoint(tmp_path) -> None:
    class Tuned(Module):
        lr = 0.01

    seen = recorder("on_checkpoint_save")
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=1)
    options = {"callbacks": [finder, saving], "enable_checkpointing": True, "max_epochs": 1}
    fit(tmp_path, [seen], module(Tuned), **options)
    assert [kwargs["step"] for kwargs in seen.named("on_checkpoint_save")] == [3, 6]


def test_the_states_of_two_callbacks_do_not_collide(tmp_path) -> None:
    first, second = Counter(), Counter()
    callbacks = [HooklineCallback([first]), HooklineCallback([second], key="second")]
    trainer = make_trainer(tmp_path, callbacks=callbacks, max_epochs=1)
    third = hookline.attach(trainer, hooks=[Counter()])
    trainer.fit(module(), data())
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    saved = torch.load(tmp_path / "all.ckpt", weights_only=True)["callbacks"]
    assert set(saved) == {"HooklineCallback", "HooklineCallback[second]", "HooklineCallback[3]"}
    assert third.step == 6
    with pytest.raises(RuntimeError, match="state_key"):
        make_trainer(tmp_path, callbacks=[HooklineCallback(), HooklineCallback()])


def test_a_checkpoint_without_hooks_and_a_damaged_one(tmp_path, caplog) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module(), data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = make_trainer(tmp_path)
    session = hookline.attach(resumed, hooks=[Counter()])
    resumed.fit(module(), data(), ckpt_path=tmp_path / "plain.ckpt")
    assert "was saved without this session" in caplog.text
    assert session.step == 12

    saved = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    saved["callbacks"] = {"HooklineCallback": {"version": 1, "state": {"step": -1}, "tensors": {}}}
    torch.save(saved, tmp_path / "damaged.ckpt")
    resumed = make_trainer(tmp_path)
    hookline.attach(resumed, hooks=[Counter()])
    with pytest.raises(hookline.CheckpointError, match=r"damaged\.ckpt"):
        resumed.fit(module(), data(), ckpt_path=tmp_path / "damaged.ckpt")


# -- stops, exceptions, signals -------------------------------------------------------------------


class StopIn(hookline.Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer, step):
        if step == self.step:
            trainer.stop("enough")


def test_a_stop_is_followed_between_two_steps(tmp_path) -> None:
    seen = recorder("on_train_end", "on_validation_end")
    session, _ = fit(
        tmp_path, [StopIn(2), seen], val=data(1), runs=tmp_path, accumulate_grad_batches=2
    )
    assert session.step == 2
    assert seen.names == ["on_validation_end", "on_train_end"]  # Lightning validates before it ends
    assert manifest(session)["status"] == "stopped"

    stopping = hookline.EarlyStopping(monitor="val/loss", patience=1, min_delta=100.0)
    session, _ = fit(tmp_path, [stopping], val=data(1), max_epochs=9)
    assert session.step == 12
    assert session.status == "stopped"


def test_lightnings_own_stop_is_a_stop(tmp_path) -> None:
    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 3

    session, _ = fit(tmp_path, [recorder()], callbacks=[Stop()])
    assert (session.step, session.status) == (3, "stopped")


@pytest.mark.parametrize(
    ("raised", "expected", "status"),
    [
        (ValueError("bad batch"), ValueError, "error"),
        (KeyboardInterrupt(), SystemExit, "interrupted"),
    ],
)
def test_exceptions_reach_hooks_and_the_run(tmp_path, raised, expected, status) -> None:
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise raised
            return super().training_step(batch, batch_idx)

    seen = recorder("on_exception", "on_train_end")
    handler = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(tmp_path)
    session = hookline.attach(trainer, hooks=[seen], runs=tmp_path)
    try:
        with pytest.raises(expected):
            trainer.fit(module(Failing), data())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C from there on
    assert seen.names == ["on_exception", "on_train_end"]
    assert seen.named("on_exception")[0]["exception"] is raised
    assert manifest(session)["status"] == status
    assert "save_checkpoint" not in vars(trainer)


def test_sigterm_is_left_to_lightning_and_the_run_is_preempted(tmp_path) -> None:
    class Preempted(hookline.Hook):
        def on_step_end(self, step):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    seen = recorder("on_exception", "on_train_end")
    saving = ModelCheckpoint(tmp_path / "ckpt", save_on_exception=True, every_n_epochs=1)
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saving])
    session = hookline.attach(trainer, hooks=[Preempted(), seen], runs=tmp_path / "runs")
    with pytest.raises(SystemExit):
        trainer.fit(module(), data())
    assert seen.names == ["on_train_end"]
    assert manifest(session)["status"] == "preempted"
    (saved,) = (tmp_path / "ckpt").glob("*.ckpt")  # by Lightning, after the hooks have ended
    resumed = make_trainer(tmp_path)
    again = hookline.attach(resumed, hooks=[recorder()], runs=tmp_path / "runs")
    resumed.fit(module(), data(), ckpt_path=saved)
    assert again.run.id == session.run.id
    assert [step for step, _ in records(again, "train/loss")] == list(range(1, 13))


# -- what attaching means -------------------------------------------------------------------------


def test_validate_test_and_predict_fire_no_events(tmp_path) -> None:
    seen = recorder()
    model = module()
    model.predict_step = lambda batch, batch_idx: model.net(batch[0])
    trainer = make_trainer(tmp_path)
    hookline.attach(trainer, hooks=[seen])
    trainer.validate(model, data(), verbose=False)
    trainer.predict(model, data())
    assert seen.names == []


def test_a_second_fit_is_refused_until_hooks_are_attached_again(tmp_path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1)
    hookline.attach(trainer, hooks=[recorder()])
    model = module()
    trainer.fit(model, data())
    before = len(trainer.callbacks)
    with pytest.raises(LoopError, match="fits a second time"):
        trainer.fit(model, data())
    seen = recorder("on_step_end")
    hookline.attach(trainer, hooks=[seen])
    assert len(trainer.callbacks) == before
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data())
    assert seen.names.count("on_step_end") == 6
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_hooks_that_need_what_is_not_there_are_refused_before_the_first_step(tmp_path) -> None:
    class Needs(hookline.Hook):
        def on_gradient_clip(self, grad_norm): ...

        def on_step_end(self, tokens_seen): ...

    model = module()
    with pytest.raises(NotSuppliedError) as raised:
        fit(tmp_path, [Needs()], model)
    assert "gradient_clip_val" in str(raised.value)
    assert "tokens" in str(raised.value)
    assert same(weights(model), weights(module()))


def test_every_event_has_a_place(tmp_path) -> None:
    assert all(where for _, where in HOST.rows())


def test_the_package_pytorch_lightning_works(tmp_path) -> None:
    import pytorch_lightning

    class Own(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seen = recorder("on_step_end", "on_train_end")
    trainer = make_trainer(tmp_path, pytorch_lightning, max_epochs=1)
    hookline.attach(trainer, hooks=[seen])
    trainer.fit(Own(), data())
    assert seen.names == ["on_step_end"] * 6 + ["on_train_end"]
