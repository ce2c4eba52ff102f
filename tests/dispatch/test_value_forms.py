"""Hooks get plain Python values, unless a parameter is annotated otherwise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
import torch
from loops import batches, make
from torch import nn
from torch.nn.functional import mse_loss

import hookline
from hookline import Hook, HookManager, LazyFloat, Metrics
from hookline import LazyFloat as Number

if TYPE_CHECKING:
    from nowhere import Unknown


class Reads:
    """A number that counts how often it is read."""

    def __init__(self, value: float = 0.5) -> None:
        self.value, self.count = value, 0

    def __float__(self) -> float:
        self.count += 1
        return self.value


def fit(model: nn.Module, optimizer: Any, *hooks: Hook, **options: Any) -> hookline.Trainer:
    settings = {"runs": None, "progress": "off", "max_epochs": 1, **options}
    trainer = hookline.Trainer(settings, model, optimizer, hooks=list(hooks), loss_fn=mse_loss)
    trainer.fit(batches(3))
    return trainer


# -- loss, grad_norm and lr ------------------------------------------------------------------------


def test_numbers_are_floats_read_once_for_all_hooks():
    class Watch(Hook):
        def on_step_end(self, loss, *, grad_norm, lr=None):
            self.seen = loss, grad_norm, lr

    hooks = [Watch() for _ in range(3)]
    loss, norm, lr = Reads(0.5), Reads(2.0), Reads(0.1)
    manager = HookManager(hooks)
    manager.fire("on_step_end", loss=loss, grad_norm=LazyFloat(norm), lr=lr)
    for hook in hooks:
        assert hook.seen == (0.5, 2.0, 0.1)
        assert [type(value) for value in hook.seen] == [float] * 3
    assert (loss.count, norm.count, lr.count) == (1, 1, 1)


def test_the_loss_before_backward_is_the_tensor():
    class Watch(Hook):
        def on_before_backward(self, loss):
            self.loss = loss

    manager = HookManager([hook := Watch()])
    manager.fire("on_before_backward", loss=(loss := torch.ones(1)))
    assert hook.loss is loss


def plain(self, loss): ...
def lazy(self, loss: LazyFloat): ...
def lazy_or_none(self, loss: LazyFloat | None = None): ...
def optional(self, loss: Optional[LazyFloat]): ...  # noqa: UP045
def qualified(self, loss: hookline.LazyFloat): ...
def quoted(self, loss: "hookline.LazyFloat | None"): ...  # noqa: UP037
def quoted_inside(self, loss: Optional["LazyFloat"]): ...  # noqa: UP037, UP045
def annotated(self, loss: Annotated[LazyFloat, "not read"]): ...
def renamed(self, loss: Number): ...
def for_types_or_none(self, loss: hookline.nowhere.LazyFloat | None): ...
def beside_unknown(self, model: Unknown, loss: LazyFloat): ...
def a_float(self, loss: float): ...
def unknown(self, loss: Unknown): ...


LAZY = [lazy, lazy_or_none, optional, qualified, quoted, quoted_inside, annotated]
LAZY += [for_types_or_none, beside_unknown, renamed]


@pytest.mark.parametrize("method", [*LAZY, plain, a_float, unknown], ids=lambda m: m.__name__)
def test_the_annotation_of_a_parameter_says_whether_its_number_is_read(method):
    hook = type("Watch", (Hook,), {"on_step_end": method})()
    loss = Reads()
    HookManager([hook]).fire("on_step_end", loss=loss, model=None)
    assert loss.count == (method not in LAZY)


def test_double_star_gets_lazy_numbers():
    class Watch(Hook):
        def on_step_end(self, **values):
            self.values = values

    loss = Reads()
    HookManager([hook := Watch()]).fire("on_step_end", loss=loss, lr=0.1, step=1)
    types = [type(hook.values[name]) for name in ("loss", "lr", "step")]
    assert types == [LazyFloat, LazyFloat, int]
    assert loss.count == 0


def test_a_number_that_cannot_be_provided_when_it_is_read_disables_the_hook(caplog):
    class Watch(Hook):
        def on_step_end(self, loss):
            pass

    def missing() -> float:
        raise hookline.NotProvidedError("This loop does not provide 'loss'.")

    class Context:
        loss = LazyFloat(missing)

    manager = HookManager([Watch()])
    manager.dispatchers.on_step_end(Context())
    assert manager.describe()[0].status == "failed"
    assert "does not provide 'loss'" in caplog.text


# -- what people do with numbers -------------------------------------------------------------------


# -- paths -----------------------------------------------------------------------------------------


def test_a_path_is_a_string_or_as_it_is_annotated():
    class Watch(Hook):
        def on_checkpoint_save(self, path, checkpoint_path: Path):
            self.seen = path, checkpoint_path

        def on_checkpoint_load(self, path: str | Path, checkpoint_path: Path | None = None):
            self.seen = path, checkpoint_path

    manager = HookManager([hook := Watch()])
    for event, given in [("save", Path("runs/1")), ("load", Path("runs/1")), ("save", "runs/1")]:
        manager.fire(f"on_checkpoint_{event}", path=given)
        assert hook.seen == ("runs/1", Path("runs/1"))


# -- metrics ---------------------------------------------------------------------------------------


class Evaluated(Hook):
    def on_eval_end(self, metrics):
        self.metrics, self.kept = metrics, dict(metrics)
        metrics["eval/extra"] = 1.0
        metrics.setdefault("eval/more", 2.0)
        metrics.update({"eval/most": 3.0})
        metrics.pop("val/f1")


class Validated(Hook):
    def on_validation_end(self, metrics):
        self.metrics, self.names = metrics, list(metrics)
        metrics["val/own"] = 4.0


def test_metrics_have_the_names_of_the_event_they_were_asked_in():
    first, second, third = Validated(), Evaluated(), Validated("third")
    metrics = Metrics({"val/loss": LazyFloat(Reads(0.5)), "val/f1": 0.9, "epoch": 3})
    HookManager([first, second, third]).fire("on_validation_end", metrics=metrics)
    assert first.names == ["val/loss", "val/f1", "epoch"]
    assert second.kept == {
        "eval/loss": 0.5,
        "eval/f1": 0.9,
        "epoch": 3,
        "eval/own": 4.0,
        "eval/perplexity": math.exp(0.5),
    }
    assert third.names == ["val/loss", "epoch", "val/own", "val/extra", "val/more", "val/most"]
    assert third.metrics is metrics


# -- the step as one object ------------------------------------------------------------------------


class KeepSteps(Hook):
    def __init__(self):
        self.steps, self.numbers = [], []

    def on_step_end(self, ctx, loss, grad_norm, lr):
        self.steps.append(ctx)
        self.numbers.append((loss, grad_norm, lr))


@pytest.mark.parametrize("clip", [None, 0.01], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("in_tensor", [False, True], ids=["lr is a number", "lr is a tensor"])
def test_steps_that_are_kept_have_the_numbers_of_their_step(clip, in_tensor):
    model, _ = make()
    lr = torch.tensor(0.1) if in_tensor else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    class Lower(Hook):
        def on_train_batch_start(self, optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # changes a tensor in place, as schedulers do

    hook = KeepSteps()
    fit(model, optimizer, hook, Lower(), clip_norm=clip)
    numbers = [(ctx.loss, ctx.grad_norm, ctx.lr) for ctx in hook.steps]
    assert numbers == hook.numbers
    assert all(len(set(column)) == 3 for column in zip(*numbers, strict=True))
    assert [lr for _, _, lr in numbers] == pytest.approx([0.05, 0.025, 0.0125])


# -- messages --------------------------------------------------------------------------------------


# -- cost ------------------------------------------------------------------------------------------
