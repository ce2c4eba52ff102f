"""One hook in the words of each of the five documents, all on one manager."""

import math
from types import SimpleNamespace

import pytest
import torch

from hookline import (
    Hook,
    HookManager,
    HookSettings,
    Metrics,
    StepContext,
    TrainerHooks,
    TrainingHook,
)


class LossGuard(TrainerHooks):
    """A framework's dialect (000): the trainer first, loaders by name, metrics."""

    def __init__(self, limit=1.0):
        super().__init__()
        self.limit = limit
        self.log = []

    def on_train_start(self, trainer):
        self.log.append(("start", trainer.name))

    def on_epoch_start(self, trainer, epoch):
        self.log.append(("epoch", epoch))

    def on_train_batch_end(self, trainer, batch, loader_idx, loader_name, metrics):
        if metrics.get("loss", 0) > self.limit:
            self.log.append(("high", loader_name, loader_idx, f"{metrics['loss']:.2f}"))
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] /= 2

    def on_gradient_clip(self, trainer, grad_norm):
        self.log.append(("clip", grad_norm))

    def on_validation_end(self, trainer, epoch, metrics):
        if "val/accuracy" in metrics:
            self.log.append(("accuracy", metrics["val/accuracy"]))

    def on_exception(self, trainer, exception):
        self.log.append(("exception", type(exception)))

    def on_training_end(self, trainer):
        self.log.append(("end", trainer.name))


class RunningMean(TrainingHook):
    """A small trainer's dialect (001): a named hook, begin and end, a state mapping."""

    def __init__(self):
        super().__init__("running_mean")
        self.losses = []
        self.log = []

    def on_train_begin(self, state):
        self.log.append(state["status"])

    def on_epoch_begin(self, epoch, state):
        self.losses = []

    def on_batch_end(self, batch_idx, loss, state):
        self.losses.append(loss)

    def on_epoch_end(self, epoch, state):
        mean = sum(self.losses) / len(self.losses)
        self.log.append((epoch, state["current_epoch"], mean))

    def on_train_end(self, state):
        self.log.append(state["status"])


class Activations(Hook):
    """A specification's dialect (002): observes outputs before the loss, gradients after."""

    def __init__(self):
        self.log = []

    def on_after_forward(self, outputs):
        self.log.append(("mean", outputs.detach().mean().item()))

    def on_gradients_ready(self, model):
        self.log.append(("gradients", all(p.grad is not None for p in model.parameters())))


class Heartbeat(TrainingHook):
    """A large loop's dialect (003): a step context, counters, no trainer anywhere."""

    def __init__(self):
        self.log = []

    def on_train_begin(self, config):
        self.log.append(("config", config))

    def on_step_end(self, ctx: StepContext):
        self.log.append(("step", ctx.step, ctx.loss, ctx.lr, ctx.tokens_seen))

    def on_eval_end(self, metrics: dict[str, float], step: int):
        self.log.append(("eval", metrics["eval/loss"], metrics["eval/perplexity"], step))

    def on_checkpoint_save(self, step: int, path: str):
        self.log.append(("saved", step, path))

    def on_train_end(self, step: int, tokens_seen: int):
        self.log.append(("end", step, tokens_seen))


class Attach(Hook):
    """An activation researcher's dialect (004): hooks on modules for as long as training runs."""

    def __init__(self, layer, limit):
        self.layer, self.limit = layer, limit
        self.captured = []
        self.handle = None

    def on_train_start(self, model):
        module = model.get_submodule(self.layer)
        self.handle = module.register_forward_hook(self._capture)

    def _capture(self, module, inputs, output):
        self.captured.append(output.detach().clone())

    def on_step_end(self):
        del self.captured[: -self.limit]

    def on_train_end(self):
        self.handle.remove()


def train(manager, model, *, steps=4):
    """A real, very small training whose loop fires all events it has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = SimpleNamespace(
        model=model,
        optimizer=optimizer,
        optimizers=[optimizer],
        config={"steps": steps},
        state={"status": "training", "current_epoch": 0},
        epoch=0,
        step=0,
        tokens_seen=0,
        status="training",
    )
    loop.trainer = SimpleNamespace(name="tiny", optimizers=loop.optimizers, model=model)
    manager.source = loop
    manager.fire("on_train_start")
    manager.fire("on_epoch_start")
    for i in range(steps):
        batch = torch.full((2, 3), float(i))
        where = {"batch": batch, "batch_idx": i, "dataloader_idx": 0, "dataloader_name": "toy"}
        manager.fire("on_train_batch_start", **where)
        outputs = model(batch)
        manager.fire("on_after_forward", outputs=outputs)
        loss = (outputs - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        manager.fire("on_gradients_ready", optimizer_idx=0)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        manager.fire("on_gradient_clip", grad_norm=norm.item(), optimizer_idx=0)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        loop.step += 1
        loop.tokens_seen += 6
        metrics = Metrics({"loss": loss.detach()})
        manager.fire("on_train_batch_end", **where, metrics=metrics, loss=loss.item())
        ctx = StepContext(loop.step, loss.detach(), norm, lr, loop.tokens_seen, model, optimizer)
        manager.fire("on_step_end", ctx=ctx)
    manager.fire(
        "on_validation_end", metrics=Metrics({"val/loss": torch.tensor(0.5), "val/accuracy": 0.75})
    )
    manager.fire("on_checkpoint_save", path="runs/1", step=loop.step)
    manager.fire("on_epoch_end", metrics={})
    loop.status = loop.state["status"] = "completed"
    manager.fire("on_train_end")
    return loop


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    hooks = [LossGuard(limit=0.1), RunningMean(), Activations(), Heartbeat(), Attach("0", limit=2)]
    manager = HookManager(settings=HookSettings(isolate=False))
    for hook in hooks:
        manager.register_hook(hook)
    return manager, hooks, train(manager, model)


def test_all_five_dialects_live_on_one_manager(trained):
    manager, _, _ = trained
    assert manager.list_hooks() == [
        "loss_guard",
        "running_mean",
        "activations",
        "heartbeat",
        "attach",
    ]
    assert all(info.calls > 0 and info.failures == 0 for info in manager.describe())


def test_the_frameworks_dialect_sees_loaders_and_metrics_and_acts_on_the_trainer(trained):
    _, (guard, *_), loop = trained
    events = [entry[0] for entry in guard.log]
    high = [entry for entry in guard.log if entry[0] == "high"]
    assert events[:2] == ["start", "epoch"]
    assert guard.log[-1] == ("end", "tiny")
    assert ("accuracy", 0.75) in guard.log
    assert events.count("clip") == 4
    assert high
    assert all(entry[1:3] == ("toy", 0) for entry in high)
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 2 ** len(high))


def test_the_small_trainers_dialect_sees_numbers_and_the_state(trained):
    _, (_, mean, *_), _ = trained
    assert mean.log[0] == "training"
    assert mean.log[1] == (0, 0, pytest.approx(sum(mean.losses) / 4))
    assert mean.log[2] == "completed"
    assert all(type(loss) is float for loss in mean.losses)


def test_the_specifications_dialect_sees_outputs_before_gradients(trained):
    _, (_, _, activations, *_), _ = trained
    assert [entry[0] for entry in activations.log] == ["mean", "gradients"] * 4
    assert all(entry[1] for entry in activations.log if entry[0] == "gradients")


def test_the_large_loops_dialect_sees_steps_as_contexts(trained):
    _, (_, mean, _, heartbeat, _), _ = trained
    assert heartbeat.log[0] == ("config", {"steps": 4})
    steps = [entry for entry in heartbeat.log if entry[0] == "step"]
    assert [(entry[1], entry[4]) for entry in steps] == [(1, 6), (2, 12), (3, 18), (4, 24)]
    assert [entry[2] for entry in steps] == pytest.approx(mean.losses)
    assert heartbeat.log[-3] == ("eval", 0.5, pytest.approx(math.exp(0.5)), 4)
    assert heartbeat.log[-2:] == [("saved", 4, "runs/1"), ("end", 4, 24)]


def test_the_researchers_dialect_captures_and_lets_go(trained):
    _, (*_, attach), loop = trained
    assert [tuple(output.shape) for output in attach.captured] == [(2, 3)] * 2
    loop.model(torch.ones(2, 3))
    assert len(attach.captured) == 2


def test_the_dialects_names_are_one_class():
    assert TrainerHooks is TrainingHook is Hook
